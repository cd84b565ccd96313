/* Check that the tables of a GptAttention fit each other and its rows; linked into models that call it.
 * The function gpt_attention calls it, too (lowering/functions/gpt_checks/contents.py). */
#include "requests_tensorrt_llm.h"

/* Read the window and the number of sinks, which do not apply to an encoder's keys. */
static int check_window(Call* call) {
    int64_t window = -1, sinks = 0;
    if (is_given(&call->windows)) {
        window = at(&call->windows, call->numbers[LAYER] % call->windows.shape[0]);
        if (window < 1 && !call->numbers[IS_CROSS]) {
            return reject("gpt_attention.window_not_positive", call->node,
                          "host_max_attention_window_sizes has a window of " N
                          " tokens: make it at least 1, or leave it out.",
                          window);
        }
        window = min_of(window, MAX_LENGTH);
    }
    if (is_given(&call->sink_length)) {
        sinks = at(&call->sink_length, 0);
        if (sinks < 0)
            return reject("gpt_attention.integer_invalid", call->node,
                          "host_sink_token_length is " N ": give an integer of at least 0.", sinks);
        sinks = min_of(sinks, MAX_LENGTH);
    }
    if (call->numbers[IS_CROSS]) {
        window = -1;
        sinks = 0;
    }
    if (window >= 0 && sinks >= window) {
        return reject("gpt_attention.sinks_exceed_window", call->node,
                      "host_sink_token_length is " N ", and host_max_attention_window_sizes has a window of " N
                      " tokens, sinks included: make the window larger, or the sinks fewer.",
                      sinks, window);
    }
    call->window = window;
    call->sinks = sinks;
    return 0;
}

/* Count the requests in the context phase, which come first. */
static int check_phases(Call* call) {
    call->contexts = call->requests;
    if (!is_given(&call->types)) return 0;
    call->contexts = 0;
    for (int64_t b = 0; b < call->requests; ++b) {
        const int64_t type = at(&call->types, b);
        if (type != 0 && type != 1) {
            return reject("gpt_attention.request_type_unknown", call->node,
                          "host_request_types of request " N " is " N ": use 0 for context and 1 for generation.", b,
                          type);
        }
        if (type == 0 && call->contexts < b) {
            return reject("gpt_attention.phases_out_of_order", call->node,
                          "host_request_types says that request " N
                          " is in the context phase, after one in the generation phase: put all requests in the "
                          "context phase first.",
                          b);
        }
        call->contexts += type == 0;
    }
    if (!call->numbers[USES_CACHE] && call->contexts < call->requests) {
        return reject("gpt_attention.cache_required", call->node,
                      "use_cache is 0, and host_request_types says that request " N
                      " is in the generation phase: give a cache, or requests in the context phase alone.",
                      call->contexts);
    }
    if (call->numbers[ROWS_EACH] >= 0 && call->contexts > 0 && call->contexts < call->requests) {
        return reject("gpt_attention.phases_mixed", call->node,
                      "qkv is padded, and host_request_types has requests in both phases, the second from request " N
                      " on: pack the rows, or make a call for each phase.",
                      call->contexts);
    }
    return 0;
}

static int check_lengths(const Call* call) {
    const int64_t repeats = call->requests ? volume(&call->sequence_length) / call->requests : 1;
    for (int64_t b = 0; b < call->requests; ++b) {
        const Request r = request_of(call, b);
        if (r.is_context && (r.new_tokens < 1 || r.new_tokens > MAX_LENGTH)) {
            return reject("gpt_attention.context_length_not_positive", call->node,
                          "context_lengths of request " N ", which is in the context phase, is " N
                          ": give it 1 to 2^40 tokens, or leave it out.",
                          b, r.new_tokens);
        }
        if (r.past < 0 || r.past > MAX_LENGTH) {
            return reject("gpt_attention.past_length_out_of_range", call->node,
                          "host_past_key_value_lengths of request " N " is " N
                          ": give the number of tokens in the cache.",
                          b, r.past);
        }
        if (!call->numbers[USES_CACHE] && r.past) {
            return reject("gpt_attention.past_without_cache", call->node,
                          "use_cache is 0, and host_past_key_value_lengths says that " N " tokens of request " N
                          " are cached: give the cache, or 0.",
                          r.past, b);
        }
        for (int64_t k = 0; is_given(&call->sequence_length) && k < repeats; ++k) {
            const int64_t length = at(&call->sequence_length, b * repeats + k);
            if (length == r.total) continue;
            return reject("gpt_attention.sequence_length_mismatch", call->node,
                          "sequence_length of request " N " is " N ", and host_past_key_value_lengths " N " and the " N
                          " tokens of this call add up to " N ": set it to the length after the call.",
                          b, length, r.past, r.new_tokens, r.total);
        }
        if (is_given(&call->host_context_lengths) && at(&call->host_context_lengths, b) != r.prompt) {
            return reject("gpt_attention.context_length_mismatch", call->node,
                          "host_context_lengths of request " N " is " N ", and context_lengths " N
                          ": give equal lengths, or leave host_context_lengths out.",
                          b, at(&call->host_context_lengths, b), r.prompt);
        }
        if (call->numbers[IS_STREAMING] && r.is_context && r.past) {
            return reject("gpt_attention.prompt_in_parts", call->node,
                          "streamingllm is 1, and request " N ", which is in the context phase, has " N
                          " past tokens by host_past_key_value_lengths: give the whole prompt in one call.",
                          b, r.past);
        }
        if (call->numbers[BEAMS] > 1 && call->window >= 0 && r.total > call->window) {
            return reject("gpt_attention.window_too_short", call->node,
                          "host_max_attention_window_sizes gives a window of " N " tokens, and request " N " has " N
                          " and " N " beams: use a window as long as the sequences, or one beam.",
                          call->window, b, r.total, call->numbers[BEAMS]);
        }
    }
    return 0;
}

/* Check that qkv has the rows of all requests. */
static int check_rows(const Call* call) {
    const int64_t rows_each = call->numbers[ROWS_EACH], beams = call->numbers[BEAMS];
    const int64_t steps = call->requests - call->contexts;
    if (rows_each < 0) {
        int64_t needed = steps * beams;
        for (int64_t b = 0; b < call->contexts; ++b) needed += at(&call->context_lengths, b);
        if (needed == call->numbers[ROWS]) return 0;
        return reject("gpt_attention.row_count_mismatch", call->node,
                      "qkv has " N " rows, and context_lengths of " N " requests in the context phase, with " N
                      " in the generation phase of " N " beams, require " N
                      ": give as many rows, in the order of the requests.",
                      call->numbers[ROWS], call->contexts, steps, beams, needed);
    }
    const int64_t sequences = call->requests * (steps ? beams : 1);
    if (call->numbers[SEQUENCES] != sequences || (steps && rows_each != 1)) {
        return reject(
            "gpt_attention.sequence_count_mismatch", call->node,
            "qkv has " N " sequences of " N " rows, and by context_lengths and host_request_types there are " N
            " in the %s phase: give one sequence for each%s.",
            call->numbers[SEQUENCES], rows_each, sequences, steps ? "generation" : "context",
            steps ? ", of one row" : "");
    }
    for (int64_t b = 0; b < call->contexts; ++b) {
        if (at(&call->context_lengths, b) > rows_each) {
            return reject("gpt_attention.padding_too_short", call->node,
                          "qkv has " N " rows for each request, and context_lengths of request " N " is " N
                          ": pad all requests to the longest.",
                          rows_each, b, at(&call->context_lengths, b));
        }
    }
    return 0;
}

/* Check that cross_kv has the tokens of the requests that bring theirs, in their first call. */
static int check_encoder(const Call* call) {
    const int64_t rows = call->numbers[CROSS_ROWS], rows_each = call->numbers[CROSS_ROWS_EACH];
    int64_t new_requests = 0, tokens = 0;
    for (int64_t b = 0; b < call->requests; ++b) {
        const Request r = request_of(call, b);
        const int64_t length = at(&call->encoder, b);
        if (length < 0 || length > MAX_LENGTH) {
            return reject("gpt_attention.encoder_length_out_of_range", call->node,
                          "encoder_input_lengths of request " N " is " N ": give the number of its keys.", b, length);
        }
        if (!r.is_context || r.past) continue;
        if (rows < 0) {
            return reject("gpt_attention.cross_kv_missing", call->node,
                          "cross_kv is missing, and request " N
                          " is in the context phase with no past: give the keys and values of its encoder.",
                          b);
        }
        if (rows_each >= 0 && length > rows_each) {
            return reject("gpt_attention.cross_padding_too_short", call->node,
                          "cross_kv has " N " tokens of each request, and encoder_input_lengths of request " N " is " N
                          ": pad all requests to the longest.",
                          rows_each, b, length);
        }
        ++new_requests;
        tokens += length;
    }
    if (rows < 0) return 0;
    const int64_t expected = rows_each >= 0 ? new_requests : tokens;
    const int64_t actual = rows_each >= 0 ? call->numbers[CROSS_SEQUENCES] : rows;
    if (actual == expected) return 0;
    const char* unit = rows_each >= 0 ? "sequences" : "tokens";
    return reject("gpt_attention.cross_kv_count_mismatch", call->node,
                  "cross_kv has " N " %s, and encoder_input_lengths of the " N
                  " requests in the context phase with no past require " N ": give the %s of only these requests.",
                  actual, unit, new_requests, expected, unit);
}

/* Check that masks have a column for each key, and tables an entry for each position. */
static int check_tables(const Call* call) {
    static const struct {
        int number;
        const char* name;
        int is_for_keys; /* otherwise for positions */
    } TABLES[] = {
        {MASK_KEYS, "attention_mask", 1},
        {PACKED_MASK_KEYS, "attention_packed_mask", 1},
        {LOGN_POSITIONS, "logn_scaling", 0},
        {BIAS_ROWS, "relative_attention_bias, for rows,", 0},
        {BIAS_KEYS, "relative_attention_bias, for keys,", 0},
        {COS_POSITIONS, "rotary_cos_sin", 0},
        {LONG_COS_POSITIONS, "long_rope_rotary_cos_sin", 0},
    };
    for (size_t k = 0; k < sizeof TABLES / sizeof *TABLES; ++k) {
        const int64_t size = call->numbers[TABLES[k].number];
        for (int64_t b = 0; size >= 0 && b < call->requests; ++b) {
            const Request r = request_of(call, b);
            int64_t needed = r.total;
            if (TABLES[k].is_for_keys) {
                needed = call->numbers[IS_CROSS] ? at(&call->encoder, b) : r.total;
            } else if (call->numbers[IS_STREAMING] && call->window >= 0 && !r.is_context) {
                needed = min_of(r.past, call->window - !call->numbers[IS_COMPATIBLE]) + 1;
            }
            const int64_t original = call->numbers[ORIGINAL];
            if (TABLES[k].number == COS_POSITIONS && original >= 0 && needed > original) continue;
            if (TABLES[k].number == LONG_COS_POSITIONS && needed <= original) continue;
            if (needed <= size) continue;
            return reject("gpt_attention.table_too_small", call->node,
                          "%s has " N " %s, and request " N " needs " N ": give at least as many.", TABLES[k].name,
                          size, TABLES[k].is_for_keys ? "keys" : "positions", b, needed);
        }
    }
    return 0;
}

/* Check that the entries of cache_indirection for tokens that are read name beams. Other entries are never read. */
static int check_beams(const Call* call) {
    const int64_t beams = call->numbers[BEAMS], tokens = call->indirection.shape[2];
    for (int64_t b = call->contexts; b < call->requests; ++b) {
        const Request r = request_of(call, b);
        if (r.prompt < 0 || r.prompt > r.past) {
            return reject(
                "gpt_attention.prompt_length_mismatch", call->node,
                "context_lengths of request " N " is " N ", host_past_key_value_lengths " N
                ": give the length of its whole prompt, which all its beams share and which lies in the cache.",
                b, r.prompt, r.past);
        }
        const int64_t oldest = call->window < 0 ? 0 : oldest_of(call, &r);
        for (int64_t t = r.prompt; t < r.past; ++t) {
            if (t >= call->sinks && t < oldest) continue;
            if (t >= tokens) {
                return reject("gpt_attention.indirection_too_short", call->node,
                              "cache_indirection is for " N " tokens, and request " N " needs " N
                              ": make its last axis at least as long.",
                              tokens, b, t + 1);
            }
            for (int64_t k = 0; k < beams; ++k) {
                const int64_t beam = at(&call->indirection, (b * beams + k) * tokens + t);
                if (beam >= 0 && beam < beams) continue;
                return reject("gpt_attention.beam_out_of_range", call->node,
                              "cache_indirection of request " N ", beam " N ", token " N ", is " N ", and there are " N
                              " beams: name a beam from 0 to " N ".",
                              b, k, t, beam, beams, beams - 1);
            }
        }
    }
    return 0;
}

static int check_call(Call* call) {
    if (check_window(call) || check_phases(call) || check_lengths(call) || check_rows(call)) return -1;
    if (call->requests == 0) return 0;
    if (call->numbers[IS_CROSS] && check_encoder(call)) return -1;
    if (check_tables(call)) return -1;
    if (is_given(&call->indirection) && !call->numbers[IS_CROSS] && check_beams(call)) return -1;
    return call->numbers[USES_CACHE] ? lowering_tensorrt_llm_slots(call) : 0;
}

/* lowering_check_tensorrt_llm(context_lengths, numbers, node, host_request_types, host_past_key_value_lengths,
 *     sequence_length, host_context_lengths, host_max_attention_window_sizes, host_sink_token_length,
 *     cache_indirection, kv_cache_block_offsets, host_kv_cache_pool_mapping, encoder_input_lengths) -> context_lengths
 *
 * Tables as the operator has them; an absent one is a number. */
CHECK_REQUESTS(tensorrt_llm) {
    Call call = {.node = requests->node, .numbers = requests->sizes, .context_lengths = requests->tables[0]};
    Table* const tables[] = {
        &call.types,   &call.past,        &call.sequence_length, &call.host_context_lengths,
        &call.windows, &call.sink_length, &call.indirection,     &call.offsets,
        &call.mapping, &call.encoder};
    for (int k = 0; k < 10; ++k) *tables[k] = requests->tables[1 + k];
    if (requests->size_count != NUMBERS || call.context_lengths.ndim != 1) return 0;
    const int64_t count = call.requests = call.context_lengths.shape[0], sequences = count * call.numbers[BEAMS];
    int fits = has_size(&call.types, count) && has_size(&call.past, count) &&
               has_size(&call.host_context_lengths, count);
    fits = fits && (has_size(&call.sequence_length, count) || has_size(&call.sequence_length, sequences));
    fits = fits && (!is_given(&call.windows) || volume(&call.windows) > 0);
    fits = fits && (!is_given(&call.sink_length) || volume(&call.sink_length) > 0);
    fits = fits && has_size(&call.encoder, count) && (is_given(&call.encoder) || !call.numbers[IS_CROSS]);
    fits = fits && (!is_given(&call.indirection) || call.indirection.shape[0] == count);
    if (is_given(&call.offsets)) {
        const int64_t* shape = call.offsets.shape + call.offsets.ndim - 4;
        fits = fits && shape[0] == count && shape[1] > 0 && shape[2] == 2;
    }
    if (is_given(&call.mapping)) {
        fits = fits && call.mapping.shape[0] > call.numbers[LAYER] && call.mapping.shape[1] == 2;
    }
    return fits && check_call(&call) ? -1 : 0;
}
