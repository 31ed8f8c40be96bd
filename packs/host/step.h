// The step input: one host block, found again as typed arrays and checked.
#pragma once
#include <cstdint>

#include "../rare.h"

namespace pk {

// row_flags of a held draft row: how many of its draws have a mask, from this bit on. The mask of draw s of a step is number n_slots + s of state.mask.
constexpr int32_t kMaskedAt = 16;

struct Step {
    const pk_step_head *head = nullptr;
    const pk_new_slot *news = nullptr;
    const pk_row *rows = nullptr;
    const pk_page_write *pages = nullptr;
    const pk_text *texts = nullptr;
    const pk_mask_write *masks = nullptr;
    const int32_t *payload = nullptr;
    int32_t n_held = 0;  // rows with PK_ROW_HELD
};

// What a step's second half brings.
struct Finish {
    const pk_finish_head *head = nullptr;
    const int32_t *slots = nullptr;
    const uint32_t *words = nullptr;  // mask after mask
};

// Finds the arrays and checks every number in them against the state's sizes: nothing that this accepts can make a pack
// write outside the state. PK_BAD_ARG with the element's index and both numbers.
int32_t read_step(const pk_step_head *input, const pk_state &state, Step *out);

// The same for the second half of step `seq`. At most max_masks(state) masks.
int32_t read_finish(const pk_finish_head *input, const pk_state &state, uint64_t seq, Finish *out);

// Bytes of the whole block (head, arrays, payload).
int64_t step_bytes(const pk_step_head &head);
int64_t finish_bytes(const pk_state &state, int32_t n_masks);
int32_t max_masks(const pk_state &state);

}  // namespace pk
