// Experts whose matrices lie in host memory. Here the "device" is host memory too: what is where is kept as on a device, bytes are copied.
#include <algorithm>
#include <climits>
#include <cstring>

#include "rare_ops.h"

namespace pk {
namespace {

// The words at op.cache.
struct Cache {
    int32_t *clock, *slot_of, *place_of, *copies, *expert_of, *used;

    explicit Cache(const pk_op_experts_fetched &op) {
        const int32_t n = op.experts.n_experts;
        clock = numbers<int32_t>(op.cache);
        slot_of = clock + PK_CACHE_HEAD;
        place_of = slot_of + n;
        copies = place_of + n;
        expert_of = copies + 2 * n;
        used = expert_of + op.n_slots;
    }
};

void tick(const pk_op_experts_fetched &op, const Cache &c) {
    if (*c.clock == INT32_MAX) {
        std::fill(c.used, c.used + op.n_slots, 0);
        *c.clock = 0;
    }
    ++*c.clock;
}

// Marks the experts that the rows choose in place_of, as -1.
void mark_chosen(const pk_op_experts_fetched &op, const Cache &c, int64_t n_rows) {
    const pk_tensor &ids = op.experts.ids;
    std::fill(c.place_of, c.place_of + op.experts.n_experts, 0);
    for (int64_t t = 0; t < n_rows; ++t) {
        const auto *row = numbers<const int32_t>(ids.data + t * ids.stride);
        for (int64_t i = 0; i < ids.cols; ++i)
            if (row[i] >= 0 && row[i] < op.experts.n_experts) c.place_of[row[i]] = -1;
    }
}

// The slot that goes next: not used in this step, for longest; -1: none.
int32_t victim_of(const pk_op_experts_fetched &op, const Cache &c) {
    int32_t best = -1;
    for (int32_t s = 0; s < op.n_slots; ++s)
        if (c.used[s] != *c.clock && (best < 0 || c.used[s] < c.used[best])) best = s;
    return best;
}

// Gives every chosen expert a place. Returns the number of copies.
int32_t choose_places(const pk_op_experts_fetched &op, const Cache &c) {
    auto *counts = numbers<uint64_t>(op.counts);
    const auto first_staging = op.n_staging ? static_cast<int32_t>((op.staging - op.slots) / op.stride) : 0;
    int32_t n_copies = 0, n_staged = 0;
    for (int32_t s = 0; s < op.n_slots; ++s) {
        const int32_t e = c.expert_of[s] - 1;
        if (e < 0 || c.place_of[e] >= 0) continue;
        c.place_of[e] = s;
        c.used[s] = *c.clock;
        ++counts[0];
    }
    for (int32_t e = 0; e < op.experts.n_experts; ++e) {
        if (c.place_of[e] >= 0) continue;
        const int32_t s = victim_of(op, c);
        if (s >= 0) {
            if (c.expert_of[s]) c.slot_of[c.expert_of[s] - 1] = 0;
            c.expert_of[s] = e + 1;
            c.slot_of[e] = s + 1;
            c.used[s] = *c.clock;
            c.place_of[e] = s;
            ++counts[1];
        } else {
            c.place_of[e] = first_staging + n_staged++;
            ++counts[2];
        }
        c.copies[2 * n_copies] = e;
        c.copies[2 * n_copies++ + 1] = c.place_of[e];
    }
    ++counts[3];
    return n_copies;
}

}  // namespace

void run_experts_fetched(Run &run, const pk_op_experts_fetched &op) {
    const Cache c(op);
    tick(op, c);
    mark_chosen(op, c, resolve_rows(op.experts.x.rows, run.n_tokens, run.n_samples));
    run.context.pool.parallel_for(choose_places(op, c), 1, [&](int64_t begin, int64_t end, int32_t) {
        for (int64_t i = begin; i < end; ++i)
            std::memcpy(numbers<uint8_t>(op.slots + c.copies[2 * i + 1] * op.stride), numbers<const uint8_t>(op.home + c.copies[2 * i] * op.stride), op.n_bytes);
    });
    run_experts(run, op.experts, {static_cast<int64_t>(op.slots - op.home), c.place_of});
}

}  // namespace pk
