/* Checks of requests as functions of a model's C code: their memory and errors (requests.h). */
#ifndef LOWERING_REQUESTS_MODEL_H
#define LOWERING_REQUESTS_MODEL_H

#include <stdarg.h>

#include "model_errors.h"
#include "requests_call.h"

/* The format of an int64_t in reject. */
#define N "%d"

/* Set the error "node: text", and return the value that a failed check returns. The format has %s and N. */
__attribute__((cold, noinline)) static int reject(const char* code, const Node* node, const char* format, ...) {
    Message message = begin_error(node->error, code);
    say(&message, node->name);
    say(&message, ": ");
    va_list arguments;
    va_start(arguments, format);
    for (char letter[2] = {0, 0}; *format != 0; ++format) {
        if (*format != '%') {
            letter[0] = *format;
            say(&message, letter);
        } else if (*++format == 's') {
            say(&message, va_arg(arguments, const char*));
        } else {
            say_number(&message, va_arg(arguments, int64_t));
        }
    }
    va_end(arguments);
    return -1;
}

/* The scratch memory of the call has room for all entries of the tables. */
static inline void* allocate_memory(const Node* node, int64_t bytes) {
    return bytes <= node->bytes ? node->memory : NULL;
}

static inline void release_memory(void* memory) { (void)memory; }

#define CHECK_REQUESTS(name) \
    __attribute__((visibility("hidden"))) int lowering_check_##name(const Requests* requests)

#endif
