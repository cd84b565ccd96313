/* Calls one kernel of a model.so without TVM: `kernel_host model.so symbol rank dims... rank dims... ...`.
 * Every argument is a float32 tensor, an int32 one if its rank begins with an i, and an int8 one if it begins with a b;
 * inputs are read from stdin one after another, the last argument is the output and goes to stdout. Stands in for the
 * few runtime functions that kernels call, so that it runs under an emulator for which no build of the runtime is at
 * hand. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <tvm/ffi/c_api.h>

void TVMFFIErrorSetRaisedFromCStr(const char* kind, const char* message) { fprintf(stderr, "%s: %s\n", kind, message); }
int TVMFFIDataTypeFromString(const TVMFFIByteArray* text, DLDataType* type) { (void)text, (void)type; return -1; }
void TVMFFIErrorSetRaisedFromCStrParts(const char* kind, const char** parts, int32_t n) {
    fprintf(stderr, "%s: ", kind);
    for (int32_t k = 0; k < n; ++k)
        if (parts[k]) fputs(parts[k], stderr);
    fputc('\n', stderr);
}
void TVMFFIErrorMoveFromRaised(TVMFFIObjectHandle* result) { *result = NULL; }
void TVMFFIErrorSetRaised(TVMFFIObjectHandle error) { (void)error; }
int TVMFFIEnvModRegisterSystemLibSymbol(const char* name, void* symbol) {
    (void)name, (void)symbol;
    return 0;
}
int TVMFFIObjectIncRef(TVMFFIObjectHandle object) {
    (void)object;
    return 0;
}
int TVMFFIObjectDecRef(TVMFFIObjectHandle object) {
    (void)object;
    return 0;
}

static void* allocate(int type, int id, uint64_t bytes, int code, int bits) {
    (void)type, (void)id, (void)code, (void)bits;
    return aligned_alloc(64, (bytes + 63) / 64 * 64);
}
static int release(int type, int id, void* memory) {
    (void)type, (void)id;
    free(memory);
    return 0;
}
static void set(void* library, const char* name, void* function) {
    void** variable = dlsym(library, name);
    if (variable) *variable = function;
}

int main(int argc, char** argv) {
    void* library = dlopen(argv[1], RTLD_NOW);
    if (!library) return fprintf(stderr, "%s\n", dlerror()), 1;
    set(library, "__TVMBackendAllocWorkspace", (void*)allocate);
    set(library, "__TVMBackendFreeWorkspace", (void*)release);
    TVMFFISafeCallType kernel = (TVMFFISafeCallType)dlsym(library, argv[2]);
    if (!kernel) return fprintf(stderr, "no %s\n", argv[2]), 1;

    enum { MOST = 16 };
    DLTensor tensors[MOST];
    int64_t shapes[MOST][8], strides[MOST][8];
    TVMFFIAny arguments[MOST] = {0}, result = {0};
    size_t bytes[MOST];
    int count = 0;
    for (int at = 3; at < argc; ++count) {
        const int is_byte = argv[at][0] == 'b', is_integer = is_byte || argv[at][0] == 'i';
        const int rank = atoi(argv[at++] + is_integer), bits = is_byte ? 8 : 32;
        bytes[count] = (size_t)bits / 8;
        for (int d = 0; d < rank; ++d) bytes[count] *= (size_t)(shapes[count][d] = atoll(argv[at++]));
        for (int d = rank - 1; d >= 0; --d) strides[count][d] = d == rank - 1 ? 1 : strides[count][d + 1] * shapes[count][d + 1];
        tensors[count] = (DLTensor){.data = allocate(0, 0, bytes[count], 0, 0),
                                    .device = {kDLCPU, 0},
                                    .ndim = rank,
                                    .dtype = {is_integer ? kDLInt : kDLFloat, (uint8_t)bits, 1},
                                    .shape = shapes[count],
                                    .strides = strides[count]};
        arguments[count].type_index = kTVMFFIDLTensorPtr;
        arguments[count].v_ptr = &tensors[count];
    }
    for (int k = 0; k < count - 1; ++k)
        if (fread(tensors[k].data, 1, bytes[k], stdin) != bytes[k]) return fprintf(stderr, "short input\n"), 1;
    if (kernel(NULL, arguments, count, &result) != 0) return fprintf(stderr, "the kernel failed\n"), 1;
    fwrite(tensors[count - 1].data, 1, bytes[count - 1], stdout);
    return 0;
}
