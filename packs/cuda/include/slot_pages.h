// What the host knows of the pages of slots, from the inputs of steps: of all programs that share the slots, whose steps may run beside each other.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "context.h"

namespace pk {

struct SlotPages {
    std::vector<int32_t> shared;  // of a slot: the page at the end of the shortest prefix that is worth sharing; 0: none (share.h)
    std::vector<int32_t> owner;   // of a page: the slot whose table got it last
    std::vector<uint64_t> needs;  // of a slot: the copy that its next row waits for
};

// Those of a state's page table.
std::shared_ptr<SlotPages> slot_pages(pk_ctx *ctx, const pk_state &state);

}  // namespace pk
