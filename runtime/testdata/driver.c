/*
 * A CUDA driver that runs nothing and writes down what it is asked: enough of the interface for launches, streams,
 * events, captures and memory in stream order. Handles are small numbers; a stream is told apart by its handle.
 */
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char text[1 << 18];
static size_t length, found_at;
static uintptr_t streams = 100, events = 500, functions, memory = 0x1000;
static char names[64][512];
static int capturing, passed, with_ids = 1;
static char failing[64];
static _Thread_local void *current;
static _Thread_local int mode;
static int ended;

/* A call that no capture survives, unless the thread has said that it is beside captures; and what follows. */
static int no_capture(int beside) {
    if (capturing && !(beside && mode == 2)) ended = 1;
    return ended ? 901 : 0;
}

static void say(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    pthread_mutex_lock(&lock);
    length += (size_t)vsnprintf(text + length, sizeof text - length, format, arguments);
    pthread_mutex_unlock(&lock);
    va_end(arguments);
}

static unsigned long n(const void *handle) { return (unsigned long)(uintptr_t)handle; }

static uintptr_t next(uintptr_t *counter, uintptr_t step) {
    pthread_mutex_lock(&lock);
    uintptr_t made = *counter += step;
    pthread_mutex_unlock(&lock);
    return made;
}

/* What tests say and ask: where `found` lies among a kernel's arguments; whether streams are captured, events have come
 * to pass, and streams have identifiers; which kernel cannot be launched. */
void fake_found_at(size_t at) { found_at = at; }
void fake_state(int captured, int past, int ids) { capturing = captured, passed = past, with_ids = ids, ended = 0; }
void fake_failing(const char *name) { snprintf(failing, sizeof failing, "%s", name); }
size_t fake_log(char *to, size_t room) {
    pthread_mutex_lock(&lock);
    size_t told = length < room ? length : room;
    memcpy(to, text, told);
    length = 0;
    pthread_mutex_unlock(&lock);
    return told;
}

int cuInit(unsigned flags) { return (void)flags, 0; }
int cuDriverGetVersion(int *version) { return *version = 13000, 0; }
int cuGetErrorName(int e, const char **s) { return *s = e == 1 ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_ERROR", 0; }
int cuGetErrorString(int e, const char **s) { return (void)e, *s = "it was told to fail", 0; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, 0; }
int cuDeviceGetCount(int *count) { return *count = 2, 0; }
int cuDeviceGetName(char *name, int room, int device) {
    return snprintf(name, (size_t)room, "Paper GPU %d", device), 0;
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) { return (void)device, *bytes = (size_t)1 << 37, 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    /* Units, compute capability 9.0, memory pools. */
    *value = attribute == 16 ? 132 : attribute == 75 ? 9 : attribute == 76 ? 0 : 1;
    return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = (void *)(uintptr_t)(10 + device), 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { return (void)device, 0; }
int cuCtxGetCurrent(void **context) { return *context = current, 0; }
int cuCtxSetCurrent(void *context) { return current = context, 0; }
int cuThreadExchangeStreamCaptureMode(int *given) {
    int before = mode;
    mode = *given, *given = before;
    return 0;
}

int cuModuleLoadData(void **module, const void *image) { return (void)image, *module = (void *)7, 0; }
int cuModuleUnload(void *module) { return (void)module, 0; }
/* Kernels that wait for the launch before them have a symbol, which these have not. */
int cuModuleGetGlobal_v2(uint64_t *address, size_t *bytes, void *module, const char *name) {
    return (void)address, (void)bytes, (void)module, (void)name, 500 /* CUDA_ERROR_NOT_FOUND */;
}
int cuModuleGetFunction(void **function, void *module, const char *name) {
    (void)module;
    uintptr_t made = next(&functions, 1);
    snprintf(names[made % 64], sizeof names[0], "%s", name);
    *function = (void *)made;
    return 0;
}
int cuFuncSetAttribute(void *f, int attribute, int value) { return (void)f, (void)attribute, (void)value, 0; }
int cuFuncGetAttribute(int *value, int attribute, void *f) { return (void)f, (void)attribute, *value = 64, 0; }
int cuTensorMapEncodeTiled(void *map, ...) { return memset(map, 1, 128), 0; }

int cuStreamCreate(void **stream, unsigned flags) { return (void)flags, *stream = (void *)next(&streams, 1), 0; }
int cuStreamDestroy_v2(void *stream) { return (void)stream, 0; }
int cuStreamGetId(void *stream, uint64_t *id) { return *id = 1000 + n(stream), no_capture(0) || !with_ids; }
int cuStreamIsCapturing(void *stream, int *status) { return (void)stream, *status = capturing, 0; }
int cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
    /* What lies outside of a capture is waited for by the flag alone that says so. */
    if (capturing && flags != 1) ended = 1;
    return say("wait %lu on %lu flags %u\n", n(event), n(stream), flags), ended ? 901 : 0;
}
int cuEventCreate(void **event, unsigned flags) { return (void)flags, *event = (void *)next(&events, 1), 0; }
int cuEventDestroy_v2(void *event) { return say("destroy %lu\n", n(event)), 0; }
int cuEventRecord(void *event, void *stream) { return say("record %lu on %lu\n", n(event), n(stream)), 0; }
int cuEventQuery(void *event) {
    say("query %lu\n", n(event));
    return no_capture(1) ? 901 : passed ? 0 : 600;
}

int cuEventElapsedTime(float *ms, void *start, void *end) { return (void)start, (void)end, *ms = 0.0f, 0; }

int cuMemPoolCreate(void **pool, const void *properties) { return (void)properties, *pool = (void *)9, 0; }
int cuMemPoolSetAttribute(void *pool, int attribute, void *value) {
    return (void)pool, (void)attribute, (void)value, 0;
}
int cuMemPoolDestroy(void *pool) { return (void)pool, 0; }
int cuMemAllocFromPoolAsync(uint64_t *address, size_t bytes, void *pool, void *stream) {
    (void)pool;
    *address = next(&memory, 0x1000);
    if (ended) return 901;
    return say("take %lx of %zu on %lu\n", (unsigned long)*address, bytes, n(stream)), 0;
}
int cuMemFreeAsync(uint64_t address, void *stream) {
    return say("free %lx on %lu\n", (unsigned long)address, n(stream)), 0;
}

int cuLaunchKernel(void *f, unsigned x, unsigned y, unsigned z, unsigned tx, unsigned ty, unsigned tz, unsigned smem,
                   void *stream, void **parameters, void **extra) {
    (void)x, (void)y, (void)z, (void)tx, (void)ty, (void)tz, (void)smem, (void)extra;
    if (ended) return 901;
    uint64_t found;
    memcpy(&found, (char *)parameters[0] + found_at, sizeof found);
    const char *name = names[n(f) % 64];
    if (failing[0] && strcmp(name, failing) == 0) return say("no launch of %s\n", name), 1;
    return say("launch %s by %lx on %lu\n", name, (unsigned long)found, n(stream)), 0;
}
