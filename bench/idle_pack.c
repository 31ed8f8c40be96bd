/* The step and result part of the pack ABI, and nothing else: rows advance, a token is made up, results are published.
 * Its clock tells the time that an 8B model would have taken on a large GPU. */
#include "../packs/pack.h"
#include <string.h>

typedef struct idle {
    int32_t n_slots, max_step_rows, n_results, reserved;
    int32_t *length;       /* [n_slots] */
    int32_t *max_length;   /* [n_slots] */
    int32_t *alive;        /* [n_slots] */
    pk_result *results;    /* [n_results, max_step_rows] */
    volatile uint64_t *done;
    int64_t *now_ns;
} idle;

PK_API int32_t idle_step(idle *state, const pk_step_head *head) {
    const pk_new_slot *fresh = (const pk_new_slot *)(head + 1);
    const pk_row *rows = (const pk_row *)(fresh + head->n_new);
    for (int i = 0; i < head->n_new; i++) {
        state->length[fresh[i].slot] = fresh[i].length;
        state->max_length[fresh[i].slot] = fresh[i].sampling.max_length;
        state->alive[fresh[i].slot] = 1;
    }
    pk_result *out = state->results + (head->seq % (uint64_t)state->n_results) * (uint64_t)state->max_step_rows;
    for (int i = 0; i < head->n_rows; i++) {
        int32_t slot = rows[i].slot;
        pk_result result = {slot, -1, PK_ROW_DEAD, state->length[slot], 0.0f, 0};
        if (state->alive[slot]) {
            state->length[slot] += rows[i].n_tokens;
            result.flags = 0;
            result.length = state->length[slot];
            if (rows[i].flags & PK_ROW_SAMPLE) {
                result.token = (int32_t)((head->seq * 7919u + (uint64_t)slot * 104729u) % 32000u);
                result.length++;
                if (result.length >= state->max_length[slot]) {
                    result.flags = PK_ROW_LENGTH;
                    state->alive[slot] = 0;
                }
            }
        }
        out[i] = result;
    }
    int32_t n_prefill = head->n_tokens - head->n_samples;
    *state->now_ns += 5000000 + 30000 * (int64_t)head->n_samples + 27000 * (int64_t)(n_prefill > 0 ? n_prefill : 0);
    __atomic_store_n(state->done, head->seq, __ATOMIC_RELEASE);
    return PK_OK;
}
