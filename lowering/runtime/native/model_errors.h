/* Errors of a model's C code. */
#ifndef LOWERING_MODEL_ERRORS_H
#define LOWERING_MODEL_ERRORS_H

#include "types.h"

/* The end of an error's text, which is cut off where the record ends. */
typedef struct {
    lowering_error* error;
    size_t length;
} Message;

static void say(Message* message, const char* text) {
    if (message->error == NULL) return;
    for (; *text != 0 && message->length + 1 < sizeof(message->error->text); ++text) {
        message->error->text[message->length++] = *text;
    }
    message->error->text[message->length] = 0;
}

static void say_number(Message* message, int64_t number) {
    char digits[24], *first = digits + sizeof(digits) - 1;
    uint64_t rest = number < 0 ? 0 - (uint64_t)number : (uint64_t)number;
    *first = 0;
    do *--first = (char)('0' + rest % 10);
    while (rest /= 10);
    if (number < 0) *--first = '-';
    say(message, first);
}

/* Begin an error. A caller that passes no record gets the status alone. */
__attribute__((cold)) static Message begin_error(lowering_error* error, const char* code) {
    Message message = {error, 0};
    size_t k = 0;
    if (error == NULL) return message;
    for (; code[k] != 0 && k + 1 < sizeof(message.error->code); ++k) message.error->code[k] = code[k];
    message.error->code[k] = 0;
    message.error->text[0] = 0;
    return message;
}

__attribute__((cold)) static int fail(lowering_error* error, const char* code, const char* text) {
    Message message = begin_error(error, code);
    say(&message, text);
    return -1;
}

#endif
