/* The tutorial's model as C functions: no runtime, no files, no memory but this program's. docs/howto/static_object.md
 * builds it. */
#include "model.h"

#include <stdio.h>
#include <stdlib.h>

#include "threads.h"

enum { BATCH = 1, TOKENS = 5, VOCABULARY = 100 };

static int64_t ids[BATCH * TOKENS] = {1, 2, 3, 5, 8};
static float logits[BATCH * TOKENS * VOCABULARY];

int main(void) {
    lowering_error error;
    const lowering_threads threads = {NULL, 2, run_on_new_threads};
    model_call call = {
        .batch = BATCH, .tokens = TOKENS, .ids = ids, .logits = logits, .weights = model_weights, .threads = &threads};

    /* Memory of a call: as much as these sizes and threads need. A program may also reserve the largest it needs. */
    const int64_t bytes = model_workspace_bytes(&call, &error);
    if (bytes < 0) return fprintf(stderr, "%s\n", error.text), 1;
    call.workspace = aligned_alloc(64, ((size_t)bytes + 64) / 64 * 64);
    if (call.workspace == NULL) return fprintf(stderr, "no memory\n"), 1;

    if (model_run(&call, &error) != 0) return fprintf(stderr, "[%s] %s\n", error.code, error.text), 1;
    const float* last = logits + (BATCH * TOKENS - 1) * VOCABULARY;
    int best = 0;
    for (int token = 1; token < VOCABULARY; ++token) best = last[token] > last[best] ? token : best;
    printf("%lld bytes of workspace, the next token is %d\n", (long long)bytes, best);

    ids[3] = VOCABULARY; /* an error is a code and a text */
    if (model_run(&call, &error) == 0) return 1;
    printf("[%s] %s\n", error.code, error.text);
    free(call.workspace);
    return 0;
}
