/* CUDA's driver as far as models/device_memory.py uses it, without a GPU: it notes its calls on stderr. */
#include <stdio.h>
#include <string.h>

typedef struct { unsigned char reserved[64]; } Handle;
typedef unsigned long long Address;

int cuGetErrorName(int code, const char **name) {
    *name = code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_INVALID_VALUE";
    return 0;
}
int cuDeviceGet(int *device, int index) { *device = 10 + index; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(0x700000000000UL + device); return 0; }
static void *current;
int cuCtxPushCurrent_v2(void *context) { current = context; return 0; }
int cuCtxPopCurrent_v2(void **context) { *context = current; current = 0; return 0; }
static int note(const char *call, Address address) {
    if (current != (void *)0x70000000000bUL) return 1;
    fprintf(stderr, "%s %llx\n", call, address);
    return 0;
}
int cuMemAlloc_v2(Address *address, size_t size) {
    if (size > 1000000) return 2;
    *address = 0x7f0000000000UL;
    return note("alloc", *address + size);
}
int cuMemFree_v2(Address address) { return note("free", address); }
int cuIpcGetMemHandle(Handle *handle, Address address) {
    memset(handle, 7, sizeof *handle);
    memcpy(handle, &address, sizeof address);
    return note("handle", address);
}
int cuIpcOpenMemHandle_v2(Address *address, Handle handle, unsigned int flags) {
    if (handle.reserved[63] != 7 || flags != 1) return 1;
    memcpy(address, &handle, sizeof *address);
    *address += 0x100;
    return note("open", *address);
}
int cuIpcCloseMemHandle(Address address) { return note("close", address); }
int cuMemHostRegister_v2(void *memory, size_t size, unsigned int flags) {
    (void)memory;
    return flags == 1 ? note("pin", size) : 1;
}
int cuMemHostUnregister(void *memory) { (void)memory; return note("unpin", 0); }
