/* Checks of requests as packed functions: their arguments, memory and errors (requests.h). */
#ifndef LOWERING_REQUESTS_PACKED_H
#define LOWERING_REQUESTS_PACKED_H

#include "checks.h"
#include "requests_call.h"

/* The printf format of an int64_t. */
#define N "%" PRId64

struct Node {
    TVMFFIByteArray name;
};

static inline Table table_of(const TVMFFIAny* value) {
    if (value->type_index == kTVMFFIInt || value->type_index == kTVMFFINone) return (Table){NULL, NULL, 0, 0};
    const DLTensor* tensor = tensor_of(value);
    const void* data = (const char*)tensor->data + tensor->byte_offset;
    return (Table){data, tensor->shape, tensor->ndim, tensor->dtype.bits == 32};
}

/* Raise "[code] node: text", and return the value that a failed check returns. */
__attribute__((format(printf, 3, 4), cold, noinline)) static int reject(const char* code, const Node* node,
                                                                        const char* format, ...) {
    Message message = {.length = 0};
    say_text(&message, node->name);
    say(&message, ": ");
    size_t room = sizeof(message.text) - message.length;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message.text + message.length, room, format, arguments);
    va_end(arguments);
    return fail(code, &message);
}

static inline void* allocate_memory(const Node* node, int64_t bytes) {
    (void)node;
    return malloc((size_t)bytes);
}

static inline void release_memory(void* memory) { free(memory); }

enum { MAX_TABLES = 16 };

/* Run a check on the arguments (table, sizes, node, more tables); return the first one. */
static inline int run_check(int (*check)(const Requests*), const TVMFFIAny* args, int count, TVMFFIAny* result) {
    Table tables[MAX_TABLES] = {table_of(&args[0])};
    for (int k = 1; k < count - 2; ++k) tables[k] = table_of(&args[2 + k]);
    const Node node = {text_of(&args[2])};
    const Requests requests = {&node, shape_of(&args[1])->data, (int64_t)shape_of(&args[1])->size, tables};
    return check(&requests) != 0 ? -1 : pass(&args[0], result);
}

#define CHECK_REQUESTS(name)                                 \
    static int check_##name(const Requests* requests);       \
    CHECK(check_##name) {                                    \
        (void)self;                                          \
        return run_check(check_##name, args, count, result); \
    }                                                        \
    static int check_##name(const Requests* requests)

#endif
