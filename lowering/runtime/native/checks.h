/* Arguments, results, integers of tensors, and errors of all checks. */
#ifndef LOWERING_CHECKS_H
#define LOWERING_CHECKS_H

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tvm/ffi/c_api.h>
#include <unistd.h>

#include "scan.h"

#define CHECK(name)                                                                                      \
    __attribute__((visibility("default"))) int __tvm_ffi_lowering_##name(void* self, const TVMFFIAny* args, \
                                                                         int32_t count, TVMFFIAny* result)

/* -- arguments and results ---------------------------------------------------------------------------------------- */

/* Return the data after the header of an object. */
static inline const void* content(const TVMFFIAny* value) { return (const char*)value->v_ptr + sizeof(TVMFFIObject); }

static inline const DLTensor* tensor_of(const TVMFFIAny* value) {
    return value->type_index == kTVMFFIDLTensorPtr ? value->v_ptr : content(value);
}

static inline const TVMFFIShapeCell* shape_of(const TVMFFIAny* value) { return content(value); }

static inline TVMFFIByteArray text_of(const TVMFFIAny* value) {
    if (value->type_index == kTVMFFISmallStr) return (TVMFFIByteArray){value->v_bytes, value->small_str_len};
    if (value->type_index == kTVMFFIRawStr) return (TVMFFIByteArray){value->v_c_str, strlen(value->v_c_str)};
    return *(const TVMFFIByteArray*)content(value);
}

static inline int pass(const TVMFFIAny* value, TVMFFIAny* result) {
    *result = *value;
    if (value->type_index >= kTVMFFIStaticObjectBegin) TVMFFIObjectIncRef(value->v_obj);
    return 0;
}

/* -- errors ------------------------------------------------------------------------------------------------------- */

typedef struct {
    char text[4096];
    size_t length;
} Message;

__attribute__((format(printf, 2, 3))) static inline void say(Message* message, const char* format, ...) {
    size_t room = sizeof(message->text) - message->length;
    va_list arguments;
    va_start(arguments, format);
    int written = vsnprintf(message->text + message->length, room, format, arguments);
    va_end(arguments);
    if (written > 0) message->length += (size_t)written < room ? (size_t)written : room - 1;
}

static inline void say_text(Message* message, TVMFFIByteArray text) { say(message, "%.*s", (int)text.size, text.data); }

static inline void say_sizes(Message* message, const int64_t* sizes, int64_t count) {
    for (int64_t k = 0; k < count; ++k) say(message, "%s%" PRId64, k ? ", " : "[", sizes[k]);
    say(message, count ? "]" : "[]");
}

/* Raise "[code] text"; the stable code identifies the cause. */
static inline int fail(const char* code, const Message* text) {
    Message message = {.length = 0};
    say(&message, "[%s] %s", code, text->text);
    TVMFFIErrorSetRaisedFromCStr("ValueError", message.text);
    return -1;
}

/* -- integers ----------------------------------------------------------------------------------------------------- */

static inline int64_t element(const DLTensor* tensor, int64_t i) {
    const void* data = (const char*)tensor->data + tensor->byte_offset;
    return integer_at(data, tensor->dtype.bits, tensor->dtype.code == kDLInt, i);
}

#endif
