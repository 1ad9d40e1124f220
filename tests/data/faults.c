/* Makes file operations below one folder fail, for tests: preloaded into the program under test.
 *
 * FAULT_PATH   the folder; operations elsewhere are left alone
 * FAULT_AT     the first operation that fails, counted from 1
 * FAULT_COUNT  how many fail from there on
 * FAULT_ERRNO  what they fail with
 * FAULT_DELAY_MS  how long every operation takes more
 * FAULT_CLOCK_S  how many seconds the clock of the day is ahead; files keep their times
 * FAULT_LOG    a file; the number of operations so far is written to it
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static atomic_long operations;
static atomic_char watched[4096];

static long number(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text ? atol(text) : otherwise;
}

static int below(const char *path) {
    const char *folder = getenv("FAULT_PATH");
    return folder && path && strncmp(path, folder, strlen(folder)) == 0;
}

/* Counts an operation; whether it is to fail. */
static int fails(void) {
    long n = atomic_fetch_add(&operations, 1) + 1;
    long delay = number("FAULT_DELAY_MS", 0);
    if (delay) usleep((useconds_t)delay * 1000);
    const char *log = getenv("FAULT_LOG");
    if (log) {
        int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, "open");
        int fd = real(log, O_WRONLY | O_CREAT | O_TRUNC, 0600);
        if (fd >= 0) {
            dprintf(fd, "%ld\n", n);
            close(fd);
        }
    }
    long at = number("FAULT_AT", 0), count = number("FAULT_COUNT", 1);
    if (at == 0 || n < at || n - at >= count) return 0;
    errno = (int)number("FAULT_ERRNO", EIO);
    return 1;
}

int clock_gettime(clockid_t clock, struct timespec *t) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int done = real(clock, t);
    if (done == 0 && clock == CLOCK_REALTIME) t->tv_sec += number("FAULT_CLOCK_S", 0);
    return done;
}

static int fd_watched(int fd) { return fd >= 0 && fd < 4096 && watched[fd]; }

static int opened(const char *path, int fd) {
    if (fd >= 0 && fd < 4096) watched[fd] = (char)below(path);
    return fd;
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

int mkdir(const char *path, mode_t mode) {
    int (*real)(const char *, mode_t) = dlsym(RTLD_NEXT, "mkdir");
    return below(path) && fails() ? -1 : real(path, mode);
}

int rename(const char *from, const char *to) {
    int (*real)(const char *, const char *) = dlsym(RTLD_NEXT, "rename");
    return below(to) && fails() ? -1 : real(from, to);
}

int unlink(const char *path) {
    int (*real)(const char *) = dlsym(RTLD_NEXT, "unlink");
    return below(path) && fails() ? -1 : real(path);
}

#define ON_FD(type, name, parameters, arguments)                            \
    type name parameters {                                                  \
        static type(*real) parameters;                                      \
        if (!real) real = dlsym(RTLD_NEXT, #name);                          \
        return fd_watched(fd) && fails() ? -1 : real arguments;             \
    }
ON_FD(ssize_t, read, (int fd, void *to, size_t n), (fd, to, n))
ON_FD(ssize_t, write, (int fd, const void *from, size_t n), (fd, from, n))
ON_FD(ssize_t, writev, (int fd, const struct iovec *from, int n), (fd, from, n))
ON_FD(ssize_t, pread64, (int fd, void *to, size_t n, off64_t at), (fd, to, n, at))
ON_FD(ssize_t, pwrite64, (int fd, const void *from, size_t n, off64_t at), (fd, from, n, at))
ON_FD(int, fsync, (int fd), (fd))
ON_FD(int, fdatasync, (int fd), (fd))
ON_FD(int, ftruncate64, (int fd, off64_t length), (fd, length))
