/* Makes file operations below one folder fail, for tests: preloaded into the program under test.
 *
 * FAULT_PATH   the folder; operations elsewhere are left alone
 * FAULT_LOG    a file; the numbers of operations and of failures so far are written to it
 *
 * Chosen failures:
 * FAULT_AT     the first operation that fails, counted from 1
 * FAULT_COUNT  how many fail from there on
 * FAULT_ERRNO  what they fail with
 * FAULT_DELAY_MS  how long every operation takes more
 * FAULT_CLOCK_S  how many seconds the clock of the day is ahead; files keep their times
 * FAULT_POWER  what was not synced when its file got another name is lost, as when the power fails then: the file is
 *              empty
 * FAULT_KILL_AT  the operation in which the process is killed; if it writes, half of that is written
 *
 * Random ones:
 * FAULT_SEED   operations fail at random, by this number: with any of the errors below, one or several in a row; writes
 *              may be cut short or torn, and some operations take long
 * FAULT_CHANCE how many of a thousand operations begin to fail
 * FAULT_SLOW_US  what an operation that takes long takes at most
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static atomic_long operations, failures;
static atomic_char watched[4096];
/* Written to and not synced since. */
static atomic_char unsynced[4096];

/* Read-only, full, no permission, too many files, defective, gone stale, busy. */
static const int ERRORS[] = {EROFS, ENOSPC, EACCES, EMFILE, EIO, ESTALE, EBUSY};

static long number(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text ? atol(text) : otherwise;
}

static int fd_watched(int fd) { return fd >= 0 && fd < 4096 && watched[fd]; }

/* By its name, or through an open folder. */
static int below(const char *path) {
    static const char OPEN[] = "/proc/self/fd/";
    const char *folder = getenv("FAULT_PATH");
    if (path && strncmp(path, OPEN, sizeof OPEN - 1) == 0) return fd_watched(atoi(path + sizeof OPEN - 1));
    return folder && path && strncmp(path, folder, strlen(folder)) == 0;
}

static int below_at(int fd, const char *path) { return path && (*path == '/' ? below(path) : fd_watched(fd)); }

/* The whole name of what a name means in an open folder; empty when nobody can tell. */
static void whole_name(int fd, const char *path, char *to, size_t size) {
    char link[64], folder[2048];
    *to = 0;
    if (*path == '/' && strncmp(path, "/proc/self/fd/", 14) != 0) {
        snprintf(to, size, "%s", path);
        return;
    }
    const char *rest = path;
    if (*path == '/') {
        fd = atoi(path + 14);
        rest = strchr(path + 14, '/') ? strchr(path + 14, '/') + 1 : "";
    }
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, folder, sizeof folder - 1);
    if (n < 0) return;
    folder[n] = 0;
    snprintf(to, size, "%s/%s", folder, rest);
}

static uint64_t mixed(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* The error that the random sequence has for operation n, or 0. It depends on the seed and n alone. */
static int random_error(long n) {
    if (!getenv("FAULT_SEED")) return 0;
    uint64_t seed = mixed((uint64_t)number("FAULT_SEED", 0));
    uint64_t own = mixed(seed ^ (uint64_t)n);
    long slow = number("FAULT_SLOW_US", 0);
    if (slow && (own >> 40) % 8 == 0) usleep((useconds_t)((own >> 20) % (uint64_t)slow));
    for (long ago = 0; ago < 8 && ago < n; ago++) {
        uint64_t r = mixed(seed ^ (uint64_t)(n - ago));
        long length = (r >> 32) % 3 ? 1 : 1 + (long)((r >> 34) % 8);
        if ((long)(r % 1000) < number("FAULT_CHANCE", 100) && ago < length)
            return ERRORS[(r >> 48) % (sizeof ERRORS / sizeof *ERRORS)];
    }
    return 0;
}

static void note(long n, long failed) {
    const char *log = getenv("FAULT_LOG");
    if (!log) return;
    int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, "open");
    int fd = real(log, O_WRONLY | O_CREAT, 0600);
    if (fd < 0) return;
    char text[64];
    int length = snprintf(text, sizeof text, "%19ld %19ld\n", n, failed);
    if (pwrite(fd, text, (size_t)length, 0) < 0) abort();
    close(fd);
}

/* Counts an operation. Whether it is to fail: then errno is set. KILLED is returned for the one that is the process's
 * last. */
enum { WORKS, FAILS, KILLED };
static int fate(void) {
    long n = atomic_fetch_add(&operations, 1) + 1;
    long delay = number("FAULT_DELAY_MS", 0);
    if (delay) usleep((useconds_t)delay * 1000);
    long at = number("FAULT_AT", 0), count = number("FAULT_COUNT", 1);
    int error = at && n >= at && n - at < count ? (int)number("FAULT_ERRNO", EIO) : random_error(n);
    note(n, error ? atomic_fetch_add(&failures, 1) + 1 : atomic_load(&failures));
    if (n == number("FAULT_KILL_AT", 0)) return KILLED;
    errno = error ? error : errno;
    return error ? FAILS : WORKS;
}

static int fails(void) {
    int what = fate();
    if (what == KILLED) raise(SIGKILL);
    return what == FAILS;
}

int clock_gettime(clockid_t clock, struct timespec *t) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int done = real(clock, t);
    if (done == 0 && clock == CLOCK_REALTIME) t->tv_sec += number("FAULT_CLOCK_S", 0);
    return done;
}

static int opened_if(int ours, int fd) {
    if (fd >= 0 && fd < 4096) {
        watched[fd] = (char)ours;
        unsynced[fd] = 0;
    }
    return fd;
}

static int opened(const char *path, int fd) { return opened_if(below(path), fd); }

int close(int fd) {
    int (*real)(int) = dlsym(RTLD_NEXT, "close");
    if (fd >= 0 && fd < 4096) watched[fd] = 0;
    return real(fd);
}

#define OPEN(name)                                                          \
    int name(const char *path, int flags, ...) {                            \
        static int (*real)(const char *, int, ...);                         \
        if (!real) real = dlsym(RTLD_NEXT, #name);                          \
        mode_t mode = 0;                                                    \
        if (flags & (O_CREAT | O_TMPFILE)) {                                \
            va_list list;                                                   \
            va_start(list, flags);                                          \
            mode = va_arg(list, mode_t);                                    \
            va_end(list);                                                   \
        }                                                                   \
        if (below(path) && fails()) return -1;                              \
        return opened(path, real(path, flags, mode));                       \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                        \
    int name(int at, const char *path, int flags, ...) {                    \
        static int (*real)(int, const char *, int, ...);                    \
        if (!real) real = dlsym(RTLD_NEXT, #name);                          \
        mode_t mode = 0;                                                    \
        if (flags & (O_CREAT | O_TMPFILE)) {                                \
            va_list list;                                                   \
            va_start(list, flags);                                          \
            mode = va_arg(list, mode_t);                                    \
            va_end(list);                                                   \
        }                                                                   \
        int ours = below_at(at, path);                                      \
        if (ours && fails()) return -1;                                     \
        return opened_if(ours, real(at, path, flags, mode));                \
    }
OPENAT(openat)
OPENAT(openat64)

/* Calls that the C library has no function for. */
long syscall(long number, ...) {
    static long (*real)(long, ...);
    if (!real) real = dlsym(RTLD_NEXT, "syscall");
    long a[6];
    va_list list;
    va_start(list, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(list, long);
    va_end(list);
    if (number != SYS_openat2) return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
    int ours = below_at((int)a[0], (const char *)a[1]);
    if (ours && fails()) return -1;
    return opened_if(ours, (int)real(number, a[0], a[1], a[2], a[3], a[4], a[5]));
}

#define ON_PATH(type, failed, name, parameters, arguments)                  \
    type name parameters {                                                  \
        static type(*real) parameters;                                      \
        if (!real) real = dlsym(RTLD_NEXT, #name);                          \
        return below(path) && fails() ? failed : real arguments;            \
    }
ON_PATH(int, -1, mkdir, (const char *path, mode_t mode), (path, mode))
ON_PATH(int, -1, unlink, (const char *path), (path))

#define ON_NAME(name, parameters, arguments)                                \
    int name parameters {                                                   \
        static int(*real) parameters;                                       \
        if (!real) real = dlsym(RTLD_NEXT, #name);                          \
        return below_at(at, path) && fails() ? -1 : real arguments;         \
    }
ON_NAME(mkdirat, (int at, const char *path, mode_t mode), (at, path, mode))
ON_NAME(unlinkat, (int at, const char *path, int flags), (at, path, flags))
ON_NAME(fstatat64, (int at, const char *path, struct stat64 *to, int flags), (at, path, to, flags))
ON_PATH(int, -1, linkat, (int from_fd, const char *from, int fd, const char *path, int flags),
        (from_fd, from, fd, path, flags))

/* Empties a file if it is open here with something in it that was not synced. */
static void lose_unsynced(int at, const char *name) {
    char path[4096];
    whole_name(at, name, path, sizeof path);
    for (int fd = 0; fd < 4096; fd++) {
        char link[32], target[4096];
        if (!fd_watched(fd) || !unsynced[fd]) continue;
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        ssize_t n = readlink(link, target, sizeof target - 1);
        if (n < 0) continue;
        target[n] = 0;
        if (strcmp(target, path) == 0 && truncate(path, 0) < 0) abort();
    }
}

#define RENAME(name, at, parameters, arguments)                             \
    int name parameters {                                                   \
        static int(*real) parameters;                                       \
        if (!real) real = dlsym(RTLD_NEXT, #name);                          \
        int ours = below_at(at, path);                                      \
        if (ours && fails()) return -1;                                     \
        if (ours && getenv("FAULT_POWER")) lose_unsynced(at, from);         \
        return real arguments;                                              \
    }
RENAME(rename, AT_FDCWD, (const char *from, const char *path), (from, path))
RENAME(renameat, fd, (int from_fd, const char *from, int fd, const char *path), (from_fd, from, fd, path))

/* An empty path means the file itself. A null one, which the header rules out, asks whether the call exists at all. */
int statx(int fd, const char *restrict path, int flags, unsigned mask, struct statx *restrict to) {
    int (*real)(int, const char *, int, unsigned, struct statx *) = dlsym(RTLD_NEXT, "statx");
    const char *volatile given = path;
    const char *name = given;
    int ours = name && (below(name) || (!*name && fd_watched(fd)));
    return ours && fails() ? -1 : real(fd, name, flags, mask, to);
}

DIR *opendir(const char *path) {
    DIR *(*real)(const char *) = dlsym(RTLD_NEXT, "opendir");
    DIR *folder = below(path) && fails() ? NULL : real(path);
    if (folder) opened(path, dirfd(folder));
    return folder;
}

struct dirent64 *readdir64(DIR *folder) {
    struct dirent64 *(*real)(DIR *) = dlsym(RTLD_NEXT, "readdir64");
    return fd_watched(dirfd(folder)) && fails() ? NULL : real(folder);
}

int closedir(DIR *folder) {
    int (*real)(DIR *) = dlsym(RTLD_NEXT, "closedir");
    int fd = dirfd(folder);
    if (fd >= 0 && fd < 4096) watched[fd] = 0;
    return real(folder);
}

#define ON_FD(type, failed, name, parameters, arguments)                    \
    type name parameters {                                                  \
        static type(*real) parameters;                                      \
        if (!real) real = dlsym(RTLD_NEXT, #name);                          \
        return fd_watched(fd) && fails() ? failed : real arguments;         \
    }
ON_FD(ssize_t, -1, read, (int fd, void *to, size_t n), (fd, to, n))
ON_FD(ssize_t, -1, pread64, (int fd, void *to, size_t n, off64_t at), (fd, to, n, at))
#define SYNC(name)                                                          \
    int name(int fd) {                                                      \
        static int (*real)(int);                                            \
        if (!real) real = dlsym(RTLD_NEXT, #name);                          \
        if (fd_watched(fd) && fails()) return -1;                           \
        if (fd_watched(fd)) unsynced[fd] = 0;                               \
        return real(fd);                                                    \
    }
SYNC(fsync)
SYNC(fdatasync)
ON_FD(int, -1, sync_file_range, (int fd, off64_t from, off64_t n, unsigned flags), (fd, from, n, flags))
ON_FD(int, -1, fstat64, (int fd, struct stat64 *to), (fd, to))
ON_FD(int, -1, ftruncate64, (int fd, off64_t length), (fd, length))
ON_FD(int, -1, flock, (int fd, int operation), (fd, operation))
ON_FD(int, -1, futimens, (int fd, const struct timespec times[2]), (fd, times))
ON_FD(void *, MAP_FAILED, mmap64, (void *to, size_t n, int prot, int flags, int fd, off64_t at),
      (to, n, prot, flags, fd, at))

/* A write that fails may have written its first half, and one that works may say that it wrote no more than that. */
#define WRITE(name, parameters, arguments, halved)                          \
    ssize_t name parameters {                                               \
        static ssize_t(*real) parameters;                                   \
        if (!real) real = dlsym(RTLD_NEXT, #name);                          \
        int what = fd_watched(fd) ? fate() : WORKS;                         \
        if (fd_watched(fd)) unsynced[fd] = 1;                               \
        if (what == WORKS) return real arguments;                           \
        int error = errno;                                                  \
        uint64_t r = mixed((uint64_t)atomic_load(&operations));             \
        int torn = what == KILLED || (getenv("FAULT_SEED") && r % 3);       \
        ssize_t half = torn ? real halved : -1;                             \
        if (what == KILLED) raise(SIGKILL);                                 \
        errno = error;                                                      \
        return torn && r % 3 == 1 && half > 0 ? half : -1;                  \
    }
WRITE(write, (int fd, const void *from, size_t n), (fd, from, n), (fd, from, n / 2))
WRITE(pwrite64, (int fd, const void *from, size_t n, off64_t at), (fd, from, n, at), (fd, from, n / 2, at))
WRITE(writev, (int fd, const struct iovec *from, int n), (fd, from, n), (fd, from, n / 2))
