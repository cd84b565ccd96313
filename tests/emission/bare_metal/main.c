/* Runs a model and prints its output as hexadecimal words, on a machine without a C library. */
#include "model.h"

static volatile uint32_t* const UART = (volatile uint32_t*)0x09000000;

void* memcpy(void* to, const void* from, size_t bytes) {
    for (size_t k = 0; k < bytes; ++k) ((char*)to)[k] = ((const char*)from)[k];
    return to;
}

void* memset(void* to, int value, size_t bytes) {
    for (size_t k = 0; k < bytes; ++k) ((char*)to)[k] = (char)value;
    return to;
}

static void print(const char* text) {
    while (*text != 0) *UART = (uint32_t)*text++;
}

static void print_word(uint32_t word) {
    for (int shift = 28; shift >= 0; shift -= 4) *UART = (uint32_t)"0123456789abcdef"[word >> shift & 15];
    *UART = '\n';
}

static float x[BATCH * N * 64], y[BATCH * N * 32], z[BATCH * N * 64];
static int64_t k[BATCH];
static char workspace[1 << 20] __attribute__((aligned(64)));

int main(void) {
    lowering_error error;
    model_call call = {.batch = BATCH, .n = N, .x = x, .k = k, .y = y, .z = z, .weights = model_weights};
    call.workspace = workspace;
    for (int i = 0; i < BATCH * N * 64; ++i) x[i] = (float)(i * 37 % 101) / 101 - 0.5f;
    for (int i = 0; i < BATCH; ++i) k[i] = i % 10;
    const int64_t bytes = model_workspace_bytes(&call, &error);
    if (bytes < 0 || bytes > (int64_t)sizeof(workspace) || model_run(&call, &error) != 0) {
        print(error.text);
        return 1;
    }
    for (int i = 0; i < BATCH * N * 32; ++i) {
        uint32_t word;
        memcpy(&word, &y[i], 4);
        print_word(word);
    }
    k[0] = 10;
    print(model_run(&call, &error) == 0 ? "accepted\n" : error.text);
    print("\n");
    return 0;
}
