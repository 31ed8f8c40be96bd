// Experts whose matrices lie in host memory. Here the "device" is host memory too: what is where is kept as on a device, bytes are copied.
#include <algorithm>
#include <climits>
#include <cstring>

#include "rare_ops.h"

namespace pk {
namespace {

constexpr int32_t kStagedWord = 2, kGuessWord = 14, kLeastGuess = -4, kMostGuess = 64, kTryEvery = 16, kLastStep = INT32_MAX - 1;  // then steps are counted anew

// The words of a cache.
struct Cache {
    const pk_expert_cache &layer;
    int32_t *head, *slot_of, *place_of, *staged_of, *copies, *expert_of, *used;
    uint64_t *counts;
    int32_t first_staging, n_copies = 0;

    explicit Cache(const pk_expert_cache &c) : layer(c) {
        head = numbers<int32_t>(c.cache);
        slot_of = head + PK_CACHE_HEAD;
        place_of = slot_of + c.n_experts;
        staged_of = place_of + c.n_experts;
        copies = staged_of + c.n_experts;
        expert_of = copies + 2 * c.n_experts;
        used = expert_of + c.n_slots;
        counts = numbers<uint64_t>(c.counts);
        first_staging = c.n_staging ? static_cast<int32_t>((c.staging - c.slots) / c.stride) : 0;
    }

    int32_t clock() const { return head[0]; }

    void tick() {
        if (head[0] == kLastStep) {
            std::fill(used, used + layer.n_slots, 0);
            head[0] = head[kStagedWord] = 0;
        }
        ++head[0];
    }

    void copy(int32_t expert, int32_t place) {
        copies[2 * n_copies] = expert;
        copies[2 * n_copies++ + 1] = place;
    }

    // The slot that was not used for longest of those that may go; -1: none.
    template <class MayGo>
    int32_t victim(const MayGo &may_go) const {
        int32_t best = -1;
        for (int32_t s = 0; s < layer.n_slots; ++s)
            if (may_go(s) && (best < 0 || used[s] < used[best])) best = s;
        return best;
    }

    void put(int32_t expert, int32_t slot, int32_t when) {
        if (expert_of[slot]) slot_of[expert_of[slot] - 1] = 0;
        expert_of[slot] = expert + 1;
        slot_of[expert] = slot + 1;
        used[slot] = when;
        copy(expert, slot);
    }

    void run_copies(Pool &pool) const {
        pool.parallel_for(n_copies, 1, [&](int64_t begin, int64_t end, int32_t) {
            for (int64_t i = begin; i < end; ++i)
                std::memcpy(numbers<uint8_t>(layer.slots + copies[2 * i + 1] * layer.stride), numbers<const uint8_t>(layer.home + copies[2 * i] * layer.stride), layer.n_bytes);
        });
    }
};

// Gives every expert that the rows choose a place.
void choose_places(Cache &c, const pk_tensor &ids, int64_t n_rows) {
    const int32_t n = c.layer.n_experts;
    std::fill(c.place_of, c.place_of + n, 0);
    for (int64_t t = 0; t < n_rows; ++t) {
        const auto *row = numbers<const int32_t>(ids.data + t * ids.stride);
        for (int64_t i = 0; i < ids.cols; ++i)
            if (row[i] >= 0 && row[i] < n) c.place_of[row[i]] = -1;
    }
    for (int32_t s = 0; s < c.layer.n_slots; ++s) {
        const int32_t e = c.expert_of[s] - 1;
        if (e < 0 || c.place_of[e] >= 0) continue;
        c.place_of[e] = s;
        if (c.used[s] == 0) c.head[kGuessWord] = std::min(kMostGuess, c.head[kGuessWord] + 2);
        c.used[s] = c.clock();
        ++c.counts[0];
    }
    const bool is_staged = c.head[kStagedWord] == c.clock();
    int32_t n_staged = 0;
    for (int32_t e = 0; e < n; ++e) {
        if (c.place_of[e] >= 0) continue;
        if (is_staged) {
            c.place_of[e] = c.staged_of[e];
            ++c.counts[0];
            continue;
        }
        const int32_t s = c.victim([&](int32_t slot) { return c.used[slot] != c.clock(); });
        if (s >= 0) {
            c.put(e, s, c.clock());
            c.place_of[e] = s;
            ++c.counts[1];
        } else {
            c.place_of[e] = c.first_staging + n_staged++;
            c.copy(e, c.place_of[e]);
            ++c.counts[2];
        }
    }
    ++c.counts[3];
}

// Every expert without a slot to slots that are empty, then to staging, for the step to come.
void stage_all(Cache &c) {
    int32_t n_staged = 0;
    for (int32_t e = 0; e < c.layer.n_experts; ++e) {
        if (c.slot_of[e]) continue;
        const int32_t s = c.victim([&](int32_t slot) { return !c.expert_of[slot]; });
        if (s >= 0) {
            c.put(e, s, 0);
            continue;
        }
        c.staged_of[e] = c.first_staging + n_staged++;
        c.copy(e, c.staged_of[e]);
    }
    c.head[kStagedWord] = c.clock() == kLastStep ? 1 : c.clock() + 1;
}

// The first n_most experts without a slot that are expected.
void put_expected(Cache &c, const pk_tensor &ids, int64_t n_rows, int32_t n_most) {
    if (c.head[kGuessWord] < 0 && c.clock() % kTryEvery) return;
    auto named = [&](int64_t t, int64_t i) { return numbers<const int32_t>(ids.data + t * ids.stride)[i]; };
    auto is_named = [&](int32_t e) {
        for (int64_t t = 0; t < n_rows; ++t)
            for (int64_t i = 0; i < ids.cols; ++i)
                if (named(t, i) == e) return true;
        return false;
    };
    for (int64_t i = 0; i < ids.cols; ++i)
        for (int64_t t = 0; t < n_rows && c.n_copies < n_most; ++t) {
            const int32_t e = named(t, i);
            if (e < 0 || e >= c.layer.n_experts || c.slot_of[e]) continue;
            const int32_t s = c.victim([&](int32_t slot) { return !c.expert_of[slot] || !is_named(c.expert_of[slot] - 1); });
            if (s < 0) break;
            c.put(e, s, 0);
        }
    c.head[kGuessWord] = std::max(kLeastGuess, c.head[kGuessWord] - c.n_copies);
}

void look_ahead(Run &run, const pk_op_experts_fetched &op, int64_t n_rows) {
    Cache c(op.next);
    if (n_rows * op.experts.ids.cols >= 4 * op.next.n_experts)
        stage_all(c);
    else if (n_rows <= PK_AHEAD_TOKENS && op.expected.data)
        put_expected(c, op.expected, n_rows, op.n_most);
    c.counts[4] += c.n_copies;
    c.run_copies(run.context.pool);
}

}  // namespace

void run_experts_fetched(Run &run, const pk_op_experts_fetched &op) {
    const int64_t n_rows = resolve_rows(op.experts.x.rows, run.n_tokens, run.n_samples);
    Cache c(op.here);
    c.tick();
    choose_places(c, op.experts.ids, n_rows);
    c.run_copies(run.context.pool);
    run_experts(run, op.experts, {static_cast<int64_t>(op.here.slots - op.here.home), c.place_of});
    if (op.next.home) look_ahead(run, op, n_rows);
}

}  // namespace pk
