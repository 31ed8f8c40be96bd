// The step input: one host block, found again as typed arrays and checked.
#pragma once
#include <cstdint>

#include "../pack.h"

namespace pk {

struct Step {
    const pk_step_head *head = nullptr;
    const pk_new_slot *news = nullptr;
    const pk_row *rows = nullptr;
    const pk_page_write *pages = nullptr;
    const pk_text *texts = nullptr;
    const pk_mask_write *masks = nullptr;
    const int32_t *payload = nullptr;
};

// Finds the arrays and checks every number in them against the state's sizes: nothing that this accepts can make a pack
// write outside the state. PK_BAD_ARG with the element's index and both numbers.
int32_t read_step(const pk_step_head *input, const pk_state &state, Step *out);

// Bytes of the whole block (head, arrays, payload).
int64_t step_bytes(const pk_step_head &head);

}  // namespace pk
