/* Runtime checks of data and sizes: packed functions that generated code calls, linked into every model.so. Each check
 * returns its first argument, so that the consumer of the checked value depends on it, or raises an error that names
 * the ONNX node. A check allocates only if it fails. */
#define _GNU_SOURCE
#pragma GCC optimize("O3") /* vectorizes loops of unknown length */
#include "checks.h"

/* -- indices ------------------------------------------------------------------------------------------------------ */

static int has_outside(const DLTensor* tensor, int64_t count, int64_t low, int64_t last) {
    const void* data = (const char*)tensor->data + tensor->byte_offset;
    return any_outside(data, tensor->dtype.bits, tensor->dtype.code == kDLInt, count, low, last);
}

/* Return line k of a text. */
static TVMFFIByteArray line(TVMFFIByteArray text, size_t k) {
    for (;; --k) {
        const char* end = memchr(text.data, '\n', text.size);
        size_t size = end == NULL ? text.size : (size_t)(end - text.data);
        if (k == 0 || end == NULL) return (TVMFFIByteArray){text.data, size};
        text.data += size + 1;
        text.size -= size + 1;
    }
}

static int reject_index(const TVMFFIAny* args, const DLTensor* tensor, int64_t at, size_t k, int64_t low,
                        int64_t last) {
    int64_t position[64], rest = at;
    for (int axis = tensor->ndim - 1; axis >= 0 && axis < 64; --axis) {
        position[axis] = rest % tensor->shape[axis];
        rest /= tensor->shape[axis];
    }
    Message message = {.length = 0};
    say_text(&message, text_of(&args[3]));
    say(&message, " contains %" PRId64, element(tensor, at));
    if (tensor->ndim > 0) say(&message, " at ");
    if (tensor->ndim > 0) say_sizes(&message, position, tensor->ndim);
    say(&message, ", and ");
    say_text(&message, line(text_of(&args[4]), k));
    if (last < low) {
        say(&message, " is empty: no index is legal.");
    } else {
        say(&message, " allows %" PRId64 " to %" PRId64 ".", low, last);
    }
    return fail("run.index_out_of_range", &message);
}

/* lowering_check_indices(indices, bounds, from_the_back, name, bounded) -> indices
 * Element i must be less than bounds[i mod count], and at least 0 or, with from_the_back, at least minus that bound.
 * name describes the indices, and line k of `bounded` describes the dimension of size bounds[k]. */
CHECK(check_indices) {
    (void)self, (void)count;
    const DLTensor* tensor = tensor_of(&args[0]);
    const TVMFFIShapeCell* bounds = shape_of(&args[1]);
    const int from_the_back = args[2].v_int64 != 0;
    int64_t volume = 1;
    for (int axis = 0; axis < tensor->ndim; ++axis) volume *= tensor->shape[axis];
    if (bounds->size == 1) {
        const int64_t last = bounds->data[0] - 1, low = from_the_back ? -bounds->data[0] : 0;
        if (volume == 0 || !has_outside(tensor, volume, low, last)) return pass(&args[0], result);
    }
    for (int64_t i = 0, k = 0; i < volume; ++i) {
        const int64_t index = element(tensor, i), last = bounds->data[k] - 1;
        const int64_t low = from_the_back ? -bounds->data[k] : 0;
        if (index < low || index > last) return reject_index(args, tensor, i, (size_t)k, low, last);
        k = k + 1 == (int64_t)bounds->size ? 0 : k + 1;
    }
    return pass(&args[0], result);
}

/* -- sizes -------------------------------------------------------------------------------------------------------- */

/* The largest dimension, which the compiler relies on. */
static const int64_t LARGEST = INT64_C(1) << 40;

/* lowering_check_sizes(sizes, others, itemsize, name) -> sizes
 * Check sizes computed from data: none is negative, and a tensor with these and the other dimensions fits into the
 * memory of the machine. With itemsize 0 they are not dimensions of a single tensor. name describes the sizes. */
CHECK(check_sizes) {
    (void)self, (void)count;
    const TVMFFIShapeCell *sizes = shape_of(&args[0]), *others = shape_of(&args[1]);
    Message message = {.length = 0};
    say_text(&message, text_of(&args[3]));
    double bytes = (double)args[2].v_int64;
    for (size_t k = 0; k < sizes->size; ++k) {
        if (sizes->data[k] < 0 || sizes->data[k] > LARGEST) {
            say(&message, " requires the sizes ");
            say_sizes(&message, sizes->data, (int64_t)sizes->size);
            say(&message, sizes->data[k] < 0 ? ", one of which is negative." : ", one of which is larger than 2^40.");
            return fail(sizes->data[k] < 0 ? "run.negative_size" : "run.size_too_large", &message);
        }
        bytes *= (double)sizes->data[k];
    }
    for (size_t k = 0; k < others->size; ++k) bytes *= (double)others->data[k];
    const double memory = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
    if (bytes > memory) {
        say(&message, " requires the sizes ");
        say_sizes(&message, sizes->data, (int64_t)sizes->size);
        say(&message, ": a result of %.3g bytes, and this machine has %.3g bytes of memory.", bytes, memory);
        return fail("run.out_of_memory", &message);
    }
    return pass(&args[0], result);
}

/* -- tensors ------------------------------------------------------------------------------------------------------ */

/* Return whether elements follow one another in memory, as those of an empty tensor do. */
static int is_compact(const DLTensor* tensor) {
    int64_t stride = 1;
    int fits = 1;
    for (int axis = tensor->ndim - 1; axis >= 0; --axis) {
        if (tensor->shape[axis] == 0) return 1;
        fits &= tensor->strides == NULL || tensor->shape[axis] == 1 || tensor->strides[axis] == stride;
        stride *= tensor->shape[axis];
    }
    return fits;
}

/* TVM stores element types as text in a file: those of a loaded artifact are read here. */
static int has_type(const DLTensor* tensor, const TVMFFIAny* type) {
    DLDataType expected = type->v_dtype;
    if (type->type_index != kTVMFFIDataType) {
        const TVMFFIByteArray text = text_of(type);
        if (TVMFFIDataTypeFromString(&text, &expected) != 0) return 0;
    }
    return memcmp(&tensor->dtype, &expected, sizeof(DLDataType)) == 0;
}

/* lowering_check_tensor(tensor, rank, [dtype,] context) -> tensor
 * Replacement of TVM's vm.builtin.check_tensor_info that also checks what kernels rely on: elements follow one another,
 * from the address of the data on. context ends with the name and type in the compiled code. */
CHECK(check_tensor) {
    (void)self;
    const DLTensor* tensor = tensor_of(&args[0]);
    Message message = {.length = 0};
    const int64_t rank = args[1].v_int64;
    if (rank >= 0 && tensor->ndim != rank) {
        say(&message, "A tensor has %d dimensions, and not %" PRId64 ": ", tensor->ndim, rank);
    } else if (count > 3 && !has_type(tensor, &args[2])) {
        say(&message, "A tensor is of another type: ");
    } else if (!is_compact(tensor)) {
        say(&message, "A tensor has strides, and must be compact: ");
    } else if (tensor->byte_offset != 0) {
        say(&message, "A tensor has a byte offset of %" PRIu64 ", and must begin where its data does: ", tensor->byte_offset);
    } else {
        return pass(&args[0], result);
    }
    say_text(&message, text_of(&args[count - 1]));
    return fail("run.tensor_unsuitable", &message);
}

/* lowering_check(value, numbers, code, text) -> value
 * Raise an error with the code and the text if numbers[0] is 0. Each {} in the text is replaced by one of the further
 * numbers. */
CHECK(check) {
    (void)self, (void)count;
    const TVMFFIShapeCell* numbers = shape_of(&args[1]);
    if (numbers->data[0] != 0) return pass(&args[0], result);
    Message message = {.length = 0};
    TVMFFIByteArray code_text = text_of(&args[2]), text = text_of(&args[3]);
    char code[128];
    snprintf(code, sizeof(code), "%.*s", (int)code_text.size, code_text.data);
    for (size_t k = 1; k < numbers->size; ++k) {
        const char* position = memmem(text.data, text.size, "{}", 2);
        if (position == NULL) break;
        const size_t before = (size_t)(position - text.data);
        say_text(&message, (TVMFFIByteArray){text.data, before});
        say(&message, "%" PRId64, numbers->data[k]);
        text.data += before + 2;
        text.size -= before + 2;
    }
    say_text(&message, text);
    return fail(code, &message);
}

/* lowering_match_shape(value, heap, rank, code 0, operand 0, code 1, ..., name)
 * Replacement of TVM's vm.builtin.match_shape, whose errors do not name the node. Dimension k must equal a number (code
 * 0) or an entry of the heap of sizes (code 3), is stored in the heap (code 1), or is ignored (code 2). */
CHECK(match_shape) {
    (void)self;
    enum { EQUALS_NUMBER = 0, STORE = 1, EQUALS_ENTRY = 3 };
    const int is_shape = args[0].type_index == kTVMFFIShape;
    const int64_t* shape = is_shape ? shape_of(&args[0])->data : tensor_of(&args[0])->shape;
    const int64_t rank = is_shape ? (int64_t)shape_of(&args[0])->size : tensor_of(&args[0])->ndim;
    int64_t* heap = args[1].type_index == kTVMFFINone ? NULL : tensor_of(&args[1])->data;
    const TVMFFIAny* pairs = args + 3;
    result->type_index = kTVMFFINone;
    result->v_int64 = 0;
    if (rank != args[2].v_int64) {
        Message message = {.length = 0};
        say_text(&message, text_of(&args[count - 1]));
        say(&message, "; its rank is %" PRId64 ", not %" PRId64 ".", rank, args[2].v_int64);
        return fail("run.rank_mismatch", &message);
    }
    for (int64_t k = 0; k < rank; ++k) {
        const int64_t code = pairs[2 * k].v_int64, operand = pairs[2 * k + 1].v_int64;
        if (code == STORE) heap[operand] = shape[k];
        if (code != EQUALS_NUMBER && code != EQUALS_ENTRY) continue;
        const int64_t expected = code == EQUALS_NUMBER ? operand : heap[operand];
        if (shape[k] == expected) continue;
        Message message = {.length = 0};
        say_text(&message, text_of(&args[count - 1]));
        say(&message, "; its size along axis %" PRId64 " is %" PRId64 ", not %" PRId64 ".", k, shape[k], expected);
        return fail("run.size_mismatch", &message);
    }
    return 0;
}
