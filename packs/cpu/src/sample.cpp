// Sampling: one token per sampled row, without sorting the vocabulary: thresholds find the few candidates that matter.
//
// Order: penalties, bias, min_length, mask; log-probabilities; temperature, top-k, typical, top-p, min-p; draw. A filter's
// probabilities are those of what the filter before it left. Draws go through the tokens by rising index, so that logits
// which differ by rounding give the same token for the same random number. Typical sampling: Meister et al. 2022, section 4.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "ops.h"

namespace pk {
namespace {

// Below this the second best token has no weight that a float could tell from 0.
constexpr float kGreedyTemperature = 1e-5f;

struct Candidate {
    int32_t index;
    float key;      // what selection orders by: smaller is better
    double weight;  // exp((logit - largest) / temperature)
};

struct Seen {
    int32_t token;
    int32_t n_output;
};

// Scratch of one worker.
struct Scratch {
    Candidate *candidates;  // [V]
    int32_t *indices;       // [V]
    Seen *seen;             // [capacity]
    int64_t capacity;       // power of two, at least twice the context
};

int64_t seen_capacity(const pk_state &s) {
    int64_t n = 64;
    while (n < 2 * (int64_t{s.max_ctx_tokens} + 1)) n *= 2;
    return n;
}

int64_t worker_bytes(const pk_state &s) {
    return round_up(s.n_vocab * sizeof(Candidate), 64) + round_up(s.n_vocab * sizeof(int32_t), 64) + seen_capacity(s) * sizeof(Seen);
}

// Rows are dealt to this many workers: no more than there can be rows, so that scratch is not for threads that have none.
int64_t n_workers(const Context &context, const pk_state &s) { return std::min<int64_t>(context.pool.n_threads(), s.max_step_rows); }

Scratch scratch_of(const Run &run, int64_t worker) {
    const pk_state &s = run.state;
    uint8_t *at = run.shared + worker * worker_bytes(s);
    auto *candidates = reinterpret_cast<Candidate *>(at);
    at += round_up(s.n_vocab * sizeof(Candidate), 64);
    auto *indices = reinterpret_cast<int32_t *>(at);
    at += round_up(s.n_vocab * sizeof(int32_t), 64);
    return {candidates, indices, reinterpret_cast<Seen *>(at), seen_capacity(s)};
}

// A number in [0, 1) from (seed, position). Source: Salmon et al. 2011, Philox4x32-10.
double uniform(uint64_t seed, int64_t position) {
    uint32_t x[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), 0, 0};
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        uint64_t a = uint64_t{0xD2511F53} * x[0], b = uint64_t{0xCD9E8D57} * x[2];
        uint32_t y0 = static_cast<uint32_t>(b >> 32) ^ x[1] ^ k0, y2 = static_cast<uint32_t>(a >> 32) ^ x[3] ^ k1;
        x[1] = static_cast<uint32_t>(b);
        x[3] = static_cast<uint32_t>(a);
        x[0] = y0;
        x[2] = y2;
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    return ((x[0] >> 5) * 67108864.0 + (x[1] >> 6)) / 9007199254740992.0;
}

// One row on its way to a token.
class Row {
   public:
    Row(const Run &run, const Scratch &scratch, const pk_op_sample &op, int64_t s)
        : run_(run), state_(run.state), scratch_(scratch), s_(s), n_(op.logits.cols), logits_(numbers<float>(op.logits.data + s * op.logits.stride)) {
        row_ = numbers<int32_t>(state_.sample_row)[s];
        slot_ = numbers<int32_t>(state_.row_slot)[row_];
        length_ = numbers<int32_t>(state_.row_position)[row_] + numbers<int32_t>(state_.sample_at)[s] - numbers<int32_t>(state_.row_start)[row_] + 1;
        p_ = numbers<pk_sampling>(state_.sampling) + slot_;
        flags_ = numbers<int32_t>(state_.row_flags)[row_];
        mask_ = slot_;
        if ((flags_ & PK_ROW_HELD) && (flags_ & PK_ROW_DRAFT)) {
            mask_ = state_.n_slots + s;
            if (length_ - numbers<int32_t>(state_.row_position)[row_] > flags_ >> kMaskedAt) flags_ |= PK_ROW_DEAD;
        }
    }

    void sample() {
        if (flags_ & PK_ROW_DEAD) return publish(-1, PK_ROW_DEAD, 0);
        bool is_scored = flags_ & PK_ROW_SCORE;
        if (!is_scored) adjust();
        int64_t words = (n_ + 31) / 32;
        top_ = run_.kernels.largest(logits_, n_, p_->use_mask && !is_scored ? numbers<uint32_t>(state_.mask) + mask_ * words : nullptr);
        if (top_.is_bad) return publish(-1, PK_ROW_NAN, 0);
        double log_sum = p_->n_logprobs >= 0 ? std::log(run_.kernels.sum_exp(logits_, n_, top_.value, 1.0f, -INFINITY)) : 0;
        int32_t n_best = p_->n_logprobs > 0 ? best(log_sum) : 0;
        int32_t token = is_scored ? successor() : draw();
        logprob_ = p_->n_logprobs >= 0 ? static_cast<float>(logits_[token] - top_.value - log_sum) : 0;
        publish(token, 0, n_best);
    }

   private:
    void adjust() {
        penalise();
        const pk_bias *bias = numbers<pk_bias>(state_.bias) + int64_t{slot_} * state_.max_bias;
        for (int32_t i = 0; i < p_->n_bias; ++i) logits_[bias[i].token] += bias[i].value;
        for (int32_t i = 0; i < p_->n_stop && length_ < p_->min_length; ++i)
            if (p_->stop[i] >= 0 && p_->stop[i] < n_) logits_[p_->stop[i]] = -INFINITY;
    }

    // The token that stands next in the slot's text.
    int32_t successor() const {
        int32_t token = numbers<int32_t>(state_.tokens)[slot_ * (int64_t{state_.max_ctx_tokens} + 1) + length_];
        return token < 0 || token >= n_ ? 0 : token;
    }

    // Where the result of this draw stands in the step's block: draft rows come last and have one result per token.
    int64_t result() const {
        const int32_t *flags = numbers<int32_t>(state_.row_flags), *start = numbers<int32_t>(state_.row_start);
        if (!(flags[row_] & PK_ROW_DRAFT)) return row_;
        int32_t first = row_;
        while (first > 0 && (flags[first - 1] & PK_ROW_DRAFT)) --first;
        return first + numbers<int32_t>(state_.sample_at)[s_] - start[first];
    }

    void publish(int32_t token, int32_t flags, int32_t n_best) {
        numbers<int32_t>(state_.sample_token)[s_] = token;
        numbers<int32_t>(state_.sample_flags)[s_] = flags | n_best << 16;
        numbers<float>(state_.sample_logprob)[s_] = logprob_;
    }

    // Tokens of the history are counted in an open hash table, so that the cost depends on the context and not on V.
    void penalise() {
        float repetition = p_->repetition_penalty, frequency = p_->frequency_penalty, presence = p_->presence_penalty;
        if (repetition == 1 && frequency == 0 && presence == 0) return;
        const int32_t *tokens = numbers<int32_t>(state_.tokens) + slot_ * (int64_t{state_.max_ctx_tokens} + 1);
        int64_t first = repetition == 1 ? std::max(p_->prompt_length, 0) : 0, capacity = 64;
        while (capacity < 2 * (length_ - first)) capacity *= 2;
        for (int64_t i = 0; i < capacity; ++i) scratch_.seen[i].token = -1;
        for (int64_t i = first; i < length_; ++i) {
            if (tokens[i] < 0 || tokens[i] >= n_) continue;
            int64_t at = (static_cast<uint32_t>(tokens[i]) * 2654435769u) & (capacity - 1);
            while (scratch_.seen[at].token >= 0 && scratch_.seen[at].token != tokens[i]) at = (at + 1) & (capacity - 1);
            if (scratch_.seen[at].token < 0) scratch_.seen[at] = {tokens[i], 0};
            scratch_.seen[at].n_output += i >= p_->prompt_length;
        }
        for (int64_t i = 0; i < capacity; ++i) {
            if (scratch_.seen[i].token < 0) continue;
            float &x = logits_[scratch_.seen[i].token];
            int32_t count = scratch_.seen[i].n_output;
            x = x > 0 ? x / repetition : x * repetition;
            if (count > 0) x -= frequency * static_cast<float>(count) + presence;
        }
    }

    // Tokens whose logit is at least `threshold` but possible, into scratch.indices.
    int64_t collect(float threshold) { return run_.kernels.collect(logits_, n_, std::max(threshold, -3.4028235e38f), scratch_.indices, n_); }

    // A distance from the largest logit at which `reaches(distance)` holds, and hardly more: found by growing, then halving.
    // Each try is one pass over V; tokens that are collected for nothing cost more.
    template <class Reaches>
    static float find_span(float first, const Reaches &reaches) {
        float low = 0, high = first;
        while (!reaches(high)) {
            low = high;
            high *= 2;
            if (high > 1e30f) return INFINITY;
        }
        for (int i = 0; i < 4 && high > first; ++i) {
            float middle = (low + high) / 2;
            (reaches(middle) ? high : low) = middle;
        }
        return high;
    }

    // At least `wanted` tokens of the largest logits (or all possible ones), in any order.
    int64_t collect_largest(int64_t wanted) {
        return collect(top_.value - find_span(1.5f, [&](float span) { return run_.kernels.count(logits_, n_, top_.value - span) >= wanted; }));
    }

    auto by_logit() const {
        return [this](int32_t a, int32_t b) { return logits_[a] != logits_[b] ? logits_[a] > logits_[b] : a < b; };
    }

    // Leaves the (at most) k largest in front. Returns how many there are.
    int64_t select_largest(int64_t k) {
        int64_t n = collect_largest(k);
        if (n > k) std::nth_element(scratch_.indices, scratch_.indices + k, scratch_.indices + n, by_logit());
        return std::min(n, k);
    }

    // The best log-probabilities, into the step's result block.
    int32_t best(double log_sum) {
        int64_t n = select_largest(std::min(p_->n_logprobs, state_.max_top));
        std::sort(scratch_.indices, scratch_.indices + n, by_logit());
        int64_t block = run_.step ? static_cast<int64_t>(run_.step->head->seq % state_.n_results) : 0;
        pk_top *out = numbers<pk_top>(state_.top) + (block * state_.max_step_rows + result()) * state_.max_top;
        for (int64_t i = 0; i < n; ++i) {
            int32_t token = scratch_.indices[i];
            out[i] = {token, static_cast<float>(logits_[token] - top_.value - log_sum)};
        }
        return static_cast<int32_t>(n);
    }

    int32_t draw() {
        if (!(p_->temperature > kGreedyTemperature)) return top_.index;
        double u = uniform(p_->seed, length_);
        factor_ = 1.0f / p_->temperature;
        bool has_top_k = p_->top_k > 0 && p_->top_k < n_;
        if (has_top_k || p_->top_p < 1 || p_->min_p > 0 || p_->typical_p < 1) return draw_candidate(u, has_top_k);
        double sum = run_.kernels.sum_exp(logits_, n_, top_.value, factor_, -INFINITY);
        int64_t found = run_.kernels.find_sum(logits_, n_, top_.value, factor_, u * sum);
        return found < 0 ? top_.index : static_cast<int32_t>(found);
    }

    double weight(int32_t index) const { return std::exp((logits_[index] - top_.value) * factor_); }

    // Fills the candidates from scratch.indices.
    double fill(int64_t n) {
        double sum = 0;
        for (int64_t i = 0; i < n; ++i) {
            int32_t index = scratch_.indices[i];
            scratch_.candidates[i] = {index, -logits_[index], weight(index)};
            sum += scratch_.candidates[i].weight;
        }
        return sum;
    }

    // Enough candidates for the filters that follow; sum: weight of everything that the next filter has to count.
    int64_t gather(bool has_top_k, double *sum) {
        if (has_top_k) {
            int64_t n = select_largest(p_->top_k);
            *sum = fill(n);
            return n;
        }
        if (p_->typical_p < 1) {
            int64_t n = collect(-INFINITY);
            *sum = fill(n);
            return n;
        }
        if (!(p_->top_p < 1)) {
            int64_t n = collect(top_.value + std::log(p_->min_p) / factor_ - 1e-3f);
            *sum = fill(n);
            return n;
        }
        *sum = run_.kernels.sum_exp(logits_, n_, top_.value, factor_, -INFINITY);
        // The margin covers the rounding of a sum over V: without it the last token of the nucleus could be missing.
        double wanted = (p_->top_p + 1e-5) * *sum;
        float span = find_span(2, [&](float x) { return run_.kernels.sum_exp(logits_, n_, top_.value, factor_, top_.value - x / factor_) >= wanted; });
        int64_t n = collect(top_.value - span / factor_);
        fill(n);
        return n;
    }

    // Leaves in front the shortest prefix, by (key, index), whose weight reaches `target`; at least one. Returns its length.
    int64_t prefix(int64_t n, double target) {
        auto order = [](const Candidate &a, const Candidate &b) { return a.key != b.key ? a.key < b.key : a.index < b.index; };
        Candidate *c = scratch_.candidates;
        int64_t low = 0, high = n;
        double sum = 0;
        while (high - low > 32) {
            int64_t middle = (low + high) / 2;
            std::nth_element(c + low, c + middle, c + high, order);
            double part = 0;
            for (int64_t i = low; i < middle; ++i) part += c[i].weight;
            if (sum + part >= target) {
                high = middle;
            } else {
                sum += part;
                low = middle;
            }
        }
        std::sort(c + low, c + high, order);
        for (; low < high; ++low) {
            sum += c[low].weight;
            if (sum >= target) return low + 1;
        }
        return std::max<int64_t>(high, 1);
    }

    static double total(const Candidate *c, int64_t n) {
        double sum = 0;
        for (int64_t i = 0; i < n; ++i) sum += c[i].weight;
        return sum;
    }

    int64_t keep_typical(int64_t n, double sum) {
        Candidate *c = scratch_.candidates;
        double log_sum = std::log(sum), entropy = 0;
        for (int64_t i = 0; i < n; ++i) {
            double log_p = (static_cast<double>(logits_[c[i].index]) - top_.value) * factor_ - log_sum;
            if (c[i].weight > 0) entropy -= c[i].weight / sum * log_p;
        }
        for (int64_t i = 0; i < n; ++i) {
            double log_p = (static_cast<double>(logits_[c[i].index]) - top_.value) * factor_ - log_sum;
            c[i].key = static_cast<float>(std::fabs(-log_p - entropy));
        }
        n = prefix(n, p_->typical_p * sum);
        for (int64_t i = 0; i < n; ++i) c[i].key = -logits_[c[i].index];
        return n;
    }

    int32_t draw_candidate(double u, bool has_top_k) {
        Candidate *c = scratch_.candidates;
        double sum;
        int64_t n = gather(has_top_k, &sum);
        if (p_->typical_p < 1) {
            n = keep_typical(n, sum);
            sum = total(c, n);
        }
        if (p_->top_p < 1) n = prefix(n, p_->top_p * sum);
        if (p_->min_p > 0) {
            double most = 0;
            for (int64_t i = 0; i < n; ++i) most = std::max(most, c[i].weight);
            n = std::partition(c, c + n, [&](const Candidate &x) { return x.weight >= p_->min_p * most; }) - c;
        }
        std::sort(c, c + n, [](const Candidate &a, const Candidate &b) { return a.index < b.index; });
        double target = u * total(c, n), seen = 0;
        for (int64_t i = 0; i < n; ++i) {
            seen += c[i].weight;
            if (seen > target) return c[i].index;
        }
        return n > 0 ? c[n - 1].index : top_.index;
    }

    const Run &run_;
    const pk_state &state_;
    const Scratch &scratch_;
    int64_t s_, n_;
    float *logits_;
    int32_t row_, slot_, flags_;
    int64_t mask_;  // number of its mask in state.mask
    int64_t length_;
    const pk_sampling *p_;
    Kernels::Largest top_{};
    float factor_ = 1, logprob_ = 0;
};

}  // namespace

int64_t sample_workspace_bytes(const Context &context, const pk_state &state) { return n_workers(context, state) * worker_bytes(state); }

void run_sample(Run &run, const pk_op_sample &op) {
    int64_t n = std::min<int64_t>(n_workers(run.context, run.state), run.n_samples);
    run.context.pool.parallel_for(n, 1, [&](int64_t begin, int64_t end, int32_t) {
        for (int64_t worker = begin; worker < end; ++worker) {
            Scratch scratch = scratch_of(run, worker);
            for (int64_t s = worker; s < run.n_samples; s += n) Row(run, scratch, op, s).sample();
        }
    });
}

}  // namespace pk
