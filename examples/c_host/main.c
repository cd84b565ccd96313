/* Run a model on ones, and print the shape and the first elements of each output.
 *
 *   onnx-lowering compile model.onnx -o out --emit library
 *   cc -Iout main.c out/lowering.c -ldl -pthread -o main
 *   ./main out batch=2 tokens=7        (a number for each symbolic size) */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lowering.h"

/* Return the number of argument NAME=NUMBER, or 1. */
static int64_t read_size(const char* name, int count, char** arguments) {
    const size_t length = strlen(name);
    for (int k = 0; k < count; ++k) {
        if (strncmp(arguments[k], name, length) == 0 && arguments[k][length] == '=') {
            return strtoll(arguments[k] + length + 1, NULL, 10);
        }
    }
    return 1;
}

/* Return memory for an array of ones, where the type is float32 or an integer, and else of zeros. */
static void* make_ones(const lowering_tensor* tensor, int64_t count) {
    unsigned char* data = calloc((size_t)count + 1, (size_t)tensor->itemsize);
    const float one = 1;
    for (int64_t k = 0; data != NULL && k < count; ++k) {
        unsigned char* element = data + k * tensor->itemsize;
        if (strcmp(tensor->dtype, "float32") == 0) memcpy(element, &one, sizeof(one));
        else if (strstr(tensor->dtype, "int") != NULL || strcmp(tensor->dtype, "bool") == 0) *element = 1;
    }
    return data;
}

static int64_t count_elements(lowering_array array) {
    int64_t count = 1;
    for (int axis = 0; axis < array.rank; ++axis) count *= array.shape[axis];
    return count;
}

static void print_output(const lowering_tensor* output, lowering_array array) {
    printf("%s: %s[", output->name, output->dtype);
    for (int axis = 0; axis < array.rank; ++axis) printf("%s%" PRId64, axis > 0 ? ", " : "", array.shape[axis]);
    printf("]");
    for (int64_t k = 0; k < 4 && k < count_elements(array) && strcmp(output->dtype, "float32") == 0; ++k) {
        printf(" %.6g", (double)((const float*)array.data)[k]);
    }
    printf("\n");
}

static int report(const lowering_error* error) {
    fprintf(stderr, "[%s] %s\n", error->code, error->text);
    return 1;
}

int main(int count, char** arguments) {
    lowering_error error;
    lowering_model* model;
    if (count < 2) return fprintf(stderr, "usage: %s FOLDER [NAME=NUMBER ...]\n", arguments[0]), 2;
    if (lowering_load(arguments[1], &model, &error) != 0) return report(&error);
    const lowering_library* library = lowering_describe(model);

    lowering_array* inputs = calloc((size_t)library->input_count + 1, sizeof(lowering_array));
    void** outputs = calloc((size_t)library->output_count + 1, sizeof(void*));
    if (inputs == NULL || outputs == NULL) return 1;
    for (int k = 0; k < library->input_count; ++k) {
        const lowering_tensor* input = &library->inputs[k];
        int64_t* shape = calloc((size_t)input->rank + 1, sizeof(int64_t));
        if (shape == NULL) return 1;
        for (int axis = 0; axis < input->rank; ++axis) {
            const int64_t size = input->shape[axis];
            shape[axis] = size >= 0 ? size : read_size(library->sizes[-1 - size].name, count - 2, arguments + 2);
        }
        inputs[k] = (lowering_array){NULL, input->rank, shape};
        inputs[k].data = make_ones(input, count_elements(inputs[k]));
    }
    lowering_bound* bound;
    int failed = lowering_bind(model, inputs, 0, &bound, &error);
    for (int k = 0; !failed && k < library->output_count; ++k) {
        const lowering_tensor* output = &library->outputs[k];
        if (output->replaced >= 0 || output->is_allocated) continue;
        const int64_t elements = count_elements(lowering_get_output(bound, k));
        outputs[k] = calloc((size_t)elements + 1, (size_t)output->itemsize);
    }
    if (!failed) failed = lowering_run(bound, outputs, &error);
    for (int k = 0; !failed && k < library->output_count; ++k) {
        lowering_array array = lowering_get_output(bound, k);
        if (array.data == NULL) array.data = outputs[k];
        print_output(&library->outputs[k], array);
    }
    if (failed) report(&error);
    lowering_unbind(bound);
    for (int k = 0; k < library->input_count; ++k) free(inputs[k].data), free((void*)inputs[k].shape);
    for (int k = 0; k < library->output_count; ++k) free(outputs[k]);
    free(inputs);
    free(outputs);
    lowering_unload(model);
    return failed ? 1 : 0;
}
