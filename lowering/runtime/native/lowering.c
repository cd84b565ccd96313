/* Load and run compiled models (lowering.h). It needs a C library with dlopen, and POSIX files and memory. */
#define _GNU_SOURCE
#include "lowering.h"

#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

struct lowering_model {
    void* code;
    const lowering_library* library;
    char* weights;
    size_t weights_bytes;
};

struct lowering_bound {
    const lowering_model* model;
    lowering_call call;
    int64_t* sizes;
    void** inputs;
    void** outputs;     /* of a run */
    void** allocated;   /* by the last run */
    int64_t** shapes;   /* of outputs, in `extents` */
    int64_t* extents;
    void* memory;       /* of the workspace */
};

__attribute__((format(printf, 3, 4))) static int fail(lowering_error* error, const char* code, const char* format, ...) {
    if (error == NULL) return -1;
    snprintf(error->code, sizeof(error->code), "%s", code);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error->text, sizeof(error->text), format, arguments);
    va_end(arguments);
    return -1;
}

static int fail_memory(lowering_error* error, int64_t bytes) {
    return fail(error, "run.out_of_memory", "There are no %lld bytes of memory.", (long long)bytes);
}

/* -- loading ------------------------------------------------------------------------------------------------------ */

/* Return whether a line of features has one, between spaces. */
static int has_word(const char* line, const char* word) {
    const size_t length = strlen(word);
    for (const char* at = line; (at = strstr(at, word)) != NULL; ++at) {
        const int begins = at != line && (at[-1] == ' ' || at[-1] == '\t');
        if (begins && (at[length] == ' ' || at[length] == '\n' || at[length] == 0)) return 1;
    }
    return 0;
}

/* Check that the machine has the features of a CPU that the code uses. */
static int check_features(const lowering_library* library, const char* folder, lowering_error* error) {
    FILE* file = fopen("/proc/cpuinfo", "re");
    char* line = NULL;
    size_t room = 0;
    int is_found = 0;
    while (file != NULL && !is_found && getline(&line, &room, file) > 0) {
        is_found = strncmp(line, "flags", 5) == 0 || strncmp(line, "Features", 8) == 0;
    }
    const char* missing = NULL;
    for (const char* const* feature = library->cpu_features; *feature != NULL && missing == NULL; ++feature) {
        if (!is_found || !has_word(line, *feature)) missing = *feature;
    }
    free(line);
    if (file != NULL) fclose(file);
    if (missing == NULL) return 0;
    return fail(error, "artifact.cpu_features_missing",
                "'%s' was built for a CPU with %s, which this one lacks: compile the model for a smaller target.", folder,
                missing);
}

/* Return whether a file ends before its section headers, which are its end: dlopen would end the process. */
static int is_truncated(const char* path) {
    Elf64_Ehdr header;
    struct stat status;
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0; /* dlopen says why */
    const int is_read = fstat(file, &status) == 0 && pread(file, &header, sizeof(header), 0) == (ssize_t)sizeof(header);
    close(file);
    if (!is_read || memcmp(header.e_ident, ELFMAG, SELFMAG) != 0) return 1;
    const uint64_t end = header.e_shoff + (uint64_t)header.e_shnum * header.e_shentsize;
    return header.e_shoff == 0 || end < header.e_shoff || end > (uint64_t)status.st_size;
}

static int load_code(lowering_model* model, const char* folder, lowering_error* error) {
    const size_t room = strlen(folder) + sizeof("/model.so");
    char* path = malloc(room);
    if (path == NULL) return fail_memory(error, (int64_t)room);
    snprintf(path, room, "%s/model.so", folder);
    const int is_damaged = is_truncated(path);
    if (!is_damaged) model->code = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    free(path);
    if (is_damaged) {
        return fail(error, "artifact.file_truncated", "'%s/model.so' is incomplete: copy the whole folder.", folder);
    }
    if (model->code == NULL) {
        return fail(error, "artifact.code_unloadable", "A model cannot be loaded from '%s': %s.", folder, dlerror());
    }
    model->library = dlsym(model->code, "lowering_description");
    if (model->library == NULL) {
        return fail(error, "artifact.code_unloadable",
                    "'%s' has a model.so that is not a library of a model: compile with --emit library.", folder);
    }
    if (model->library->interface != LOWERING_INTERFACE || model->library->bytes < sizeof(lowering_library)) {
        return fail(error, "artifact.format_mismatch",
                    "'%s' was compiled for interface %u, and this program has interface %d: use lowering.c of the folder.",
                    folder, model->library->interface, LOWERING_INTERFACE);
    }
    return check_features(model->library, folder, error);
}

/* Fill memory with the begin of a file; return how many bytes it has. */
static size_t read_file(int file, char* memory, size_t bytes) {
    size_t done = 0;
    for (ssize_t count = 1; count > 0 && done < bytes; done += count > 0 ? (size_t)count : 0) {
        count = pread(file, memory + done, bytes - done, (off_t)done);
    }
    return done;
}

static int load_weights(lowering_model* model, const char* folder, lowering_error* error) {
    const size_t bytes = (size_t)model->library->weights_bytes;
    if (bytes == 0) return 0;
    const size_t room = strlen(folder) + sizeof("/weights.bin");
    char* path = malloc(room);
    if (path == NULL) return fail_memory(error, (int64_t)room);
    snprintf(path, room, "%s/weights.bin", folder);
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    free(path);
    if (file < 0) {
        return fail(error, "artifact.file_missing", "'%s/weights.bin' cannot be opened: copy the whole folder.", folder);
    }
    /* It is read into pages of the process: a mapped file ends the process when it becomes shorter. */
    void* pages = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) {
        close(file);
        return fail_memory(error, (int64_t)bytes);
    }
    model->weights = pages, model->weights_bytes = bytes;
#ifdef MADV_HUGEPAGE
    madvise(pages, bytes, MADV_HUGEPAGE); /* advice that not every kernel supports */
#endif
    const size_t done = read_file(file, model->weights, bytes);
    close(file);
    if (done == bytes) return 0;
    return fail(error, "artifact.file_truncated", "'%s/weights.bin' lacks %lld of %lld bytes: copy the whole folder.",
                folder, (long long)(bytes - done), (long long)bytes);
}

int lowering_load(const char* folder, lowering_model** model, lowering_error* error) {
    if (folder == NULL || model == NULL) {
        return fail(error, "argument.pointer_missing", "The folder and the address of the model must not be NULL.");
    }
    *model = NULL;
    lowering_model* loaded = calloc(1, sizeof(lowering_model));
    if (loaded == NULL) return fail_memory(error, sizeof(lowering_model));
    if (load_code(loaded, folder, error) != 0 || load_weights(loaded, folder, error) != 0) {
        lowering_unload(loaded);
        return -1;
    }
    *model = loaded;
    return 0;
}

void lowering_unload(lowering_model* model) {
    if (model == NULL) return;
    if (model->weights != NULL) munmap(model->weights, model->weights_bytes);
    if (model->code != NULL) dlclose(model->code);
    free(model);
}

const lowering_library* lowering_describe(const lowering_model* model) { return model == NULL ? NULL : model->library; }

/* -- inputs ------------------------------------------------------------------------------------------------------- */

static int check_size(const lowering_bound* bound, int number, int axis, int64_t size, lowering_error* error) {
    const lowering_library* library = bound->model->library;
    const lowering_tensor* input = &library->inputs[number];
    const int64_t expected = input->shape[axis];
    if (expected >= 0) {
        if (size == expected) return 0;
        return fail(error, "input.size_mismatch", "Input '%s' must have size %lld along axis %d, not %lld.", input->name,
                    (long long)expected, axis, (long long)size);
    }
    const lowering_size* symbol = &library->sizes[-1 - expected];
    int64_t* value = &bound->sizes[-1 - expected];
    if (*value >= 0 && *value != size) {
        return fail(error, "input.dimension_mismatch",
                    "Dimension '%s' is %lld in input '%s' (axis %d) and %lld in an earlier input.", symbol->name,
                    (long long)size, input->name, axis, (long long)*value);
    }
    if (size < symbol->lower || size > symbol->upper) {
        return fail(error, "input.dimension_out_of_range",
                    "Dimension '%s' is %lld in input '%s' (axis %d), and must be %lld to %lld.", symbol->name,
                    (long long)size, input->name, axis, (long long)symbol->lower, (long long)symbol->upper);
    }
    *value = size;
    return 0;
}

/* Return the bytes of an input, whose sizes are checked. */
static double count_bytes(const lowering_tensor* tensor, const lowering_array* array) {
    double bytes = tensor->itemsize;
    for (int axis = 0; axis < array->rank; ++axis) bytes *= (double)array->shape[axis];
    return bytes;
}

static int check_input(const lowering_bound* bound, int number, const lowering_array* array, lowering_error* error) {
    const lowering_tensor* input = &bound->model->library->inputs[number];
    if (array->rank != input->rank || (array->rank > 0 && array->shape == NULL)) {
        return fail(error, "input.rank_mismatch", "Input '%s' must have %d dimensions, not %d.", input->name, input->rank,
                    array->shape == NULL ? 0 : array->rank);
    }
    for (int axis = 0; axis < array->rank; ++axis) {
        if (check_size(bound, number, axis, array->shape[axis], error) != 0) return -1;
    }
    const double bytes = count_bytes(input, array);
    if (bytes > 0 && array->data == NULL) {
        return fail(error, "run.tensor_missing", "Input '%s' is NULL, and needs %.0f bytes.", input->name, bytes);
    }
    if (bytes > 0 && (uintptr_t)array->data % (uintptr_t)input->itemsize != 0) {
        return fail(error, "run.tensor_unaligned", "Input '%s' does not begin at a multiple of %d bytes.", input->name,
                    input->itemsize);
    }
    bound->inputs[number] = array->data;
    return 0;
}

/* Check that no other input is in the memory of one that an output replaces. */
static int check_replaced(const lowering_bound* bound, const lowering_array* inputs, lowering_error* error) {
    const lowering_library* library = bound->model->library;
    for (int k = 0; k < library->output_count; ++k) {
        const int written = library->outputs[k].replaced;
        if (written < 0) continue;
        const char* begin = inputs[written].data;
        const char* end = begin + (size_t)count_bytes(&library->inputs[written], &inputs[written]);
        for (int other = 0; other < library->input_count; ++other) {
            const char* other_begin = inputs[other].data;
            const char* other_end = other_begin + (size_t)count_bytes(&library->inputs[other], &inputs[other]);
            if (other == written || begin >= other_end || other_begin >= end) continue;
            return fail(error, "donate.memory_shared",
                        "Inputs '%s' and '%s' share memory, but the first becomes output '%s'. Pass separate arrays.",
                        library->inputs[written].name, library->inputs[other].name, library->outputs[k].name);
        }
    }
    return 0;
}

/* -- bound calls -------------------------------------------------------------------------------------------------- */

/* Read sizes from the data of inputs; return whether one has changed. */
static int read_elements(lowering_bound* bound) {
    const lowering_library* library = bound->model->library;
    int is_changed = 0;
    for (int k = 0; k < library->size_count; ++k) {
        const lowering_size* size = &library->sizes[k];
        if (size->input < 0 || bound->inputs[size->input] == NULL) continue;
        int64_t value;
        memcpy(&value, (const char*)bound->inputs[size->input] + 8 * (size_t)size->element, sizeof(value));
        is_changed |= bound->sizes[k] != value;
        bound->sizes[k] = value;
    }
    return is_changed;
}

/* Lay out a call, and provide its workspace. */
static int plan(lowering_bound* bound, lowering_error* error) {
    const int64_t bytes = bound->model->library->plan(&bound->call, bound->extents, error);
    if (bytes < 0) return -1;
    if (bound->memory != NULL && bytes <= bound->call.workspace_bytes) return 0;
    free(bound->memory);
    bound->memory = malloc((size_t)bytes + 64);
    bound->call.workspace_bytes = bound->memory == NULL ? 0 : bytes;
    if (bound->memory == NULL) return fail_memory(error, bytes);
    bound->call.workspace = (char*)bound->memory + (-(uintptr_t)bound->memory & 63);
    return 0;
}

static lowering_bound* allocate_bound(const lowering_model* model) {
    const lowering_library* library = model->library;
    size_t rank = 0;
    for (int k = 0; k < library->output_count; ++k) rank += (size_t)library->outputs[k].rank;
    const size_t inputs = (size_t)library->input_count + 1, outputs = (size_t)library->output_count + 1;
    lowering_bound* bound = calloc(1, sizeof(lowering_bound));
    if (bound == NULL) return NULL;
    bound->model = model;
    bound->sizes = calloc((size_t)library->size_count + 1, sizeof(int64_t));
    bound->inputs = calloc(inputs, sizeof(void*));
    bound->outputs = calloc(outputs, sizeof(void*));
    bound->allocated = calloc(outputs, sizeof(void*));
    bound->shapes = calloc(outputs, sizeof(int64_t*));
    bound->extents = calloc(rank + 1, sizeof(int64_t));
    if (bound->sizes != NULL && bound->inputs != NULL && bound->outputs != NULL && bound->allocated != NULL &&
        bound->shapes != NULL && bound->extents != NULL) {
        int64_t* extents = bound->extents;
        for (int k = 0; k < library->output_count; extents += library->outputs[k++].rank) bound->shapes[k] = extents;
        for (int k = 0; k < library->size_count; ++k) bound->sizes[k] = -1;
        return bound;
    }
    lowering_unbind(bound);
    return NULL;
}

static int fill_bound(lowering_bound* bound, const lowering_array* inputs, int32_t threads, lowering_error* error) {
    const lowering_library* library = bound->model->library;
    for (int k = 0; k < library->input_count; ++k) {
        if (check_input(bound, k, &inputs[k], error) != 0) return -1;
    }
    if (check_replaced(bound, inputs, error) != 0) return -1;
    read_elements(bound);
    bound->call = (lowering_call){.sizes = bound->sizes, .inputs = bound->inputs, .outputs = bound->outputs,
                                  .shapes = bound->shapes, .weights = bound->model->weights,
                                  .thread_count = threads == 0 ? library->count_cpus() : threads};
    if (threads == 0 && bound->call.thread_count > 1024) bound->call.thread_count = 1024;
    return plan(bound, error);
}

int lowering_bind(const lowering_model* model, const lowering_array* inputs, int32_t threads, lowering_bound** bound,
                  lowering_error* error) {
    if (model == NULL || bound == NULL || (inputs == NULL && model->library->input_count > 0)) {
        return fail(error, "argument.pointer_missing",
                    "The model, the inputs and the address of the bound call must not be NULL.");
    }
    *bound = NULL;
    lowering_bound* filled = allocate_bound(model);
    if (filled == NULL) return fail_memory(error, sizeof(lowering_bound));
    if (fill_bound(filled, inputs, threads, error) != 0) {
        lowering_unbind(filled);
        return -1;
    }
    *bound = filled;
    return 0;
}

static void release_allocated(lowering_bound* bound) {
    for (int k = 0; bound->allocated != NULL && k < bound->model->library->output_count; ++k) {
        if (bound->allocated[k] != NULL) bound->model->library->release(bound->allocated[k]);
        bound->allocated[k] = NULL;
    }
}

void lowering_unbind(lowering_bound* bound) {
    if (bound == NULL) return;
    release_allocated(bound);
    free(bound->sizes);
    free(bound->inputs);
    free(bound->outputs);
    free(bound->allocated);
    free(bound->shapes);
    free(bound->extents);
    free(bound->memory);
    free(bound);
}

lowering_array lowering_get_output(const lowering_bound* bound, int32_t number) {
    if (bound == NULL || number < 0 || number >= bound->model->library->output_count) return (lowering_array){NULL, 0, NULL};
    const lowering_tensor* output = &bound->model->library->outputs[number];
    void* data = output->replaced >= 0 ? bound->inputs[output->replaced] : bound->allocated[number];
    return (lowering_array){data, output->rank, bound->shapes[number]};
}

int lowering_run(lowering_bound* bound, void* const* outputs, lowering_error* error) {
    if (bound == NULL || outputs == NULL) {
        return fail(error, "argument.pointer_missing", "The bound call and the outputs must not be NULL.");
    }
    const lowering_library* library = bound->model->library;
    release_allocated(bound);
    if (read_elements(bound) && plan(bound, error) != 0) return -1;
    for (int k = 0; k < library->output_count; ++k) {
        const lowering_tensor* output = &library->outputs[k];
        bound->outputs[k] = output->is_allocated ? (void*)&bound->allocated[k] : output->replaced >= 0 ? NULL : outputs[k];
    }
    return library->run(&bound->call, error);
}

void lowering_observe(lowering_bound* bound, const lowering_observer* observer) {
    if (bound != NULL) bound->call.observer = observer;
}
