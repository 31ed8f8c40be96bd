// Sampling: one token per sampled row from f32 logits, by blocks of kThreads.
//
// adjust_logits: penalties, bias, min_length and mask on the logits of rows that have any. reduce_part: of a part of
// the vocabulary the largest logit with its lowest index, sums of exponentials and NaNs (kParts blocks per row). pick: joins
// the parts, finds filter thresholds by radix selection on ordered keys with fixed-point masses (no sort, no order
// dependence), and draws by inverse CDF over rising index with Philox on (seed, position). Filters: top-k, typical, top-p,
// min-p, each on what the one before left. Same arithmetic order of decisions as the CPU pack.
#pragma once
#include "plain_rows.cuh"

namespace pk::sampling {

constexpr int kThreads = 1024, kParts = kMaxSampleBlocks;

struct Part {
    float largest;
    int32_t index;
    float sum;         // of exp(l - largest)
    float sum_heated;  // of exp((l - largest) / temperature)
    int32_t is_bad;
    int32_t padding[3];
};

struct SampleArguments {
    pk_state s;
    const StepInfo *info;
    float *logits;
    int64_t stride;
    Part *parts;
    int32_t n;
    Tops tops;
};

// A number in [0, 1) from (seed, position). Source: Salmon et al. 2011, Philox4x32-10.
__device__ double uniform(uint64_t seed, int64_t position) {
    uint32_t x0 = static_cast<uint32_t>(position), x1 = static_cast<uint32_t>(position >> 32), x2 = 0, x3 = 0;
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const uint32_t a_low = 0xD2511F53u * x0, a_high = __umulhi(0xD2511F53u, x0), b_low = 0xCD9E8D57u * x2, b_high = __umulhi(0xCD9E8D57u, x2);
        const uint32_t y0 = b_high ^ x1 ^ k0, y2 = a_high ^ x3 ^ k1;
        x1 = b_low; x3 = a_low; x0 = y0; x2 = y2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return ((x0 >> 5) * 67108864.0 + (x1 >> 6)) / 9007199254740992.0;
}

// Whether the draw is made from what the product left of its row.
__device__ __forceinline__ bool takes_tops(const SampleArguments &a, const RowFacts &f) { return has_tops(a.tops, a.info->n_samples) && is_plain(f); }

// Where the result of draw `s` stands in the step's block: draft rows come last and have one result per token.
__device__ int result_of(const SampleArguments &a, const RowFacts &f, int s) {
    const int32_t *flags = at<int32_t>(a.s.row_flags);
    if (!(flags[f.row] & PK_ROW_DRAFT)) return f.row;
    int first = f.row;
    while (first > 0 && (flags[first - 1] & PK_ROW_DRAFT)) --first;
    return first + at<int32_t>(a.s.sample_at)[s] - at<int32_t>(a.s.row_start)[first];
}

// Penalties, bias, min_length and mask on the logits [first, last) of a draw. seen: two bits each of them (seen anywhere, seen in the output), in words.
__host__ __device__ inline int seen_words(int n) { return (n + 31) / 32; }
__device__ void adjust_logits(const SampleArguments &a, const RowFacts &f, float *logits, int first, int last, uint32_t *seen) {
    const pk_sampling &p = *f.p;
    const float repetition = p.repetition_penalty, frequency = p.frequency_penalty, presence = p.presence_penalty;
    const int tid = threadIdx.x, words = seen_words(last - first);
    auto is_mine = [&](int t) { return t >= first && t < last; };
    auto see = [&](uint32_t *bits, int t) { return !(atomicOr(bits + (t - first) / 32, 1u << ((t - first) & 31)) & (1u << ((t - first) & 31))); };
    if (repetition != 1.0f || frequency != 0.0f || presence != 0.0f) {
        uint32_t *output = seen + words;
        for (int i = tid; i < 2 * words; i += kThreads) seen[i] = 0;
        __syncthreads();
        const int32_t *tokens = at<int32_t>(a.s.tokens) + f.slot * (static_cast<int64_t>(a.s.max_ctx_tokens) + 1);
        for (int i = tid; i < f.length; i += kThreads) {
            const int t = tokens[i];
            if (!is_mine(t) || repetition == 1.0f) continue;
            if (see(seen, t)) logits[t] = logits[t] > 0.0f ? logits[t] / repetition : logits[t] * repetition;
        }
        __syncthreads();
        // Presence once, then frequency for every time: equal terms, so that their order does not matter.
        for (int i = max(p.prompt_length, 0) + tid; i < f.length; i += kThreads) {
            const int t = tokens[i];
            if (!is_mine(t) || presence == 0.0f) continue;
            if (see(output, t)) logits[t] -= presence;
        }
        __syncthreads();
        for (int i = max(p.prompt_length, 0) + tid; i < f.length && frequency != 0.0f; i += kThreads) {
            const int t = tokens[i];
            if (is_mine(t)) atomicAdd(logits + t, -frequency);
        }
        __syncthreads();
    }
    const pk_bias *bias = at<pk_bias>(a.s.bias) + static_cast<int64_t>(f.slot) * a.s.max_bias;
    for (int i = tid; i < p.n_bias; i += kThreads)
        if (is_mine(bias[i].token)) atomicAdd(logits + bias[i].token, bias[i].value);
    __syncthreads();
    if (tid < p.n_stop && f.length < p.min_length && is_mine(p.stop[tid])) logits[p.stop[tid]] = -INFINITY;
    if (p.use_mask) {
        const uint32_t *mask = at<uint32_t>(a.s.mask) + f.mask * ((a.n + 31) / 32);
        __syncthreads();
        for (int i = first + tid; i < last; i += kThreads)
            if (!(mask[i >> 5] >> (i & 31) & 1)) logits[i] = -INFINITY;
    }
}

__device__ __forceinline__ void better(float &v, int &i, float w, int j) {
    if (w > v || (w == v && j < i)) {
        v = w;
        i = j;
    }
}

// Largest value of the warp and its lowest index; every lane gets them.
__device__ void warp_largest(float &v, int &i) {
    for (int o = 16; o; o >>= 1) {
        const float w = __shfl_xor_sync(~0u, v, o);
        const int j = __shfl_xor_sync(~0u, i, o);
        better(v, i, w, j);
    }
}

// Of the block; every thread gets them.
__device__ void block_largest(float &v, int &i, float *values, int *indices) {
    warp_largest(v, i);
    const int warp = threadIdx.x >> 5, n = blockDim.x >> 5;
    __syncthreads();
    if ((threadIdx.x & 31) == 0) {
        values[warp] = v;
        indices[warp] = i;
    }
    __syncthreads();
    const int lane = threadIdx.x & 31;
    v = lane < n ? values[lane] : -INFINITY;
    i = lane < n ? indices[lane] : 0x7fffffff;
    warp_largest(v, i);
}

__host__ __device__ inline int part_size(int n) { return ((n + kParts - 1) / kParts + 3) & ~3; }

// Part `part` of draw s, by a block.
struct ReduceShared {
    float values[33];
    int indices[32];
};
__device__ void reduce_part(const SampleArguments &a, const pk_sampling &p, int s, int part, ReduceShared &sh) {
    constexpr int kOnce = 10;  // in flight
    const float *logits = a.logits + s * a.stride;
    const int size = part_size(a.n), first = part * size, last = min(first + size, a.n);
    const float temperature = p.temperature;  // on their way with the logits
    const int n_logprobs = p.n_logprobs;
    float v = -INFINITY;
    int index = 0x7fffffff;
    bool is_bad = false;
    for (int from = first + threadIdx.x; from < last; from += kOnce * kThreads) {
        float x[kOnce];
#pragma unroll
        for (int k = 0; k < kOnce; ++k) x[k] = from + k * kThreads < last ? logits[from + k * kThreads] : -INFINITY;
#pragma unroll
        for (int k = 0; k < kOnce; ++k) {
            is_bad |= x[k] != x[k];
            if (from + k * kThreads < last) better(v, index, x[k], from + k * kThreads);
        }
    }
    is_bad = __syncthreads_or(is_bad);
    block_largest(v, index, sh.values, sh.indices);
    float sum = 0.0f, heated = 0.0f;
    const float factor = temperature > kGreedyTemperature ? 1.0f / temperature : 1.0f;
    const bool wants_sum = n_logprobs >= 0 && v > -INFINITY, wants_heated = temperature > kGreedyTemperature && v > -INFINITY;
    if (wants_sum || wants_heated) {
        for (int i = first + threadIdx.x; i < last; i += kThreads) {
            const float d = logits[i] - v;
            if (wants_sum) sum += __expf(d);
            if (wants_heated) heated += __expf(d * factor);
        }
        __syncthreads();
        sum = block_sum(sum, sh.values);
        __syncthreads();
        heated = block_sum(heated, sh.values);
    }
    if (threadIdx.x == 0) a.parts[s * kParts + part] = {v, index, sum, heated, is_bad ? 1 : 0, {}};
}

// Larger key, larger float.
__device__ __forceinline__ uint32_t ordered(float v) {
    const uint32_t u = __float_as_uint(v);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

struct PickShared {
    unsigned long long bins[256];
    unsigned long long running;
    uint32_t prefix;
    float values[33];
    int indices[32];
    double sums[33];
    int found;
};

// The smallest key T such that the tokens with key >= T (of those with keep) weigh at least `target`: radix selection, 8
// bits a turn. weigh(i): fixed-point weight; key(i): ordered key; tokens with weight 0 are not there.
template <class Weigh, class Key>
__device__ uint32_t threshold(PickShared &sh, int n, unsigned long long target, Weigh weigh, Key key) {
    uint32_t prefix = 0;
    unsigned long long above = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        __syncthreads();
        for (int i = threadIdx.x; i < 256; i += kThreads) sh.bins[i] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < n; i += kThreads) {
            const unsigned long long w = weigh(i);
            if (w == 0) continue;
            const uint32_t k = key(i);
            if (shift == 24 || (k >> (shift + 8)) == (prefix >> (shift + 8))) atomicAdd(&sh.bins[(k >> shift) & 255], w);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            unsigned long long running = above;
            int bin = 255;
            for (; bin > 0; --bin) {
                if (running + sh.bins[bin] >= target) break;
                running += sh.bins[bin];
            }
            sh.running = running;
            sh.prefix = prefix | static_cast<uint32_t>(bin) << shift;
        }
        __syncthreads();
        above = sh.running;
        prefix = sh.prefix;
    }
    return prefix;
}

__device__ double block_sum64(PickShared &sh, double v) {
    for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) sh.sums[threadIdx.x >> 5] = v;
    __syncthreads();
    double total = 0.0;
    for (int i = 0; i < kThreads / 32; ++i) total += sh.sums[i];
    return total;
}

// First index (rising) at which the running sum of weigh(i) over [first, last) passes `target`; -1 when it never does.
template <class Weigh>
__device__ int find_sum(PickShared &sh, int first, int last, double target, Weigh weigh) {
    const int per = (last - first + kThreads - 1) / kThreads, from = min(first + static_cast<int>(threadIdx.x) * per, last), to = min(from + per, last);
    double mine = 0.0;
    int last_there = -1;
    for (int i = from; i < to; ++i) {
        const double w = weigh(i);
        mine += w;
        if (w > 0.0) last_there = i;
    }
    double scan = mine;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (int o = 1; o < 32; o <<= 1) {
        const double up = __shfl_up_sync(~0u, scan, o);
        if (lane >= o) scan += up;
    }
    __syncthreads();
    if (lane == 31) sh.sums[warp] = scan;
    if (threadIdx.x == 0) sh.found = 0x7fffffff;
    __syncthreads();
    double before = scan - mine;
    for (int i = 0; i < warp; ++i) before += sh.sums[i];
    if (before + mine > target && mine > 0.0) {
        double running = before;
        int found = last_there;
        for (int i = from; i < to; ++i) {
            running += weigh(i);
            if (running > target) {
                found = i;
                break;
            }
        }
        atomicMin(&sh.found, found);
    }
    __syncthreads();
    return sh.found == 0x7fffffff ? -1 : sh.found;
}

// Joins the parts of draw s, or its tops where there may be some, and draws, by a block.
template <bool kMayHaveTops>
__device__ void pick(const SampleArguments &a, const RowFacts &f, int s, PickShared &sh) {
    const pk_sampling &p = *f.p;
    const float *logits = a.logits + s * a.stride;
    const Part *parts = a.parts + s * kParts;
    auto publish = [&](int token, int flags, float logprob) {
        if (threadIdx.x == 0) {
            at<int32_t>(a.s.sample_token)[s] = token;
            at<int32_t>(a.s.sample_flags)[s] = flags;
            at<float>(a.s.sample_logprob)[s] = logprob;
        }
    };
    if (f.is_dead) return publish(-1, PK_ROW_DEAD, 0.0f);
    float top = -INFINITY;
    int top_index = 0x7fffffff;
    bool is_bad = false;
    if (kMayHaveTops && takes_tops(a, f)) {
        const int n = a.info->n_samples <= a.tops.few ? a.tops.n_few : a.tops.n_many;
        for (int i = threadIdx.x; i < n; i += kThreads) {
            const Top t = a.tops.tops[static_cast<int64_t>(s) * a.tops.stride + i];
            is_bad |= t.largest != t.largest;
            better(top, top_index, t.largest, t.index);
        }
        is_bad = __syncthreads_or(is_bad);
        block_largest(top, top_index, sh.values, sh.indices);
    } else {
        // A part a lane. Other blocks of this launch may have written them.
        const Part *mine = parts + threadIdx.x % kParts;
        top = __ldcg(&mine->largest);
        top_index = __ldcg(&mine->index);
        is_bad = __any_sync(~0u, __ldcg(&mine->is_bad) != 0);
        for (int o = kParts / 2; o; o >>= 1) {
            const float w = __shfl_xor_sync(~0u, top, o);
            const int j = __shfl_xor_sync(~0u, top_index, o);
            better(top, top_index, w, j);
        }
    }
    if (is_bad || !(top > -INFINITY) || top == INFINITY) return publish(-1, PK_ROW_NAN, 0.0f);
    double log_sum = 0.0;
    int n_best = 0;
    if (p.n_logprobs >= 0) {
        double sum = 0.0;
        for (int i = 0; i < kParts; ++i) sum += parts[i].sum * exp(static_cast<double>(parts[i].largest) - top);
        log_sum = log(sum);
        const int wanted = min(min(p.n_logprobs, a.s.max_top), a.n);
        pk_top *out = at<pk_top>(a.s.top) + (static_cast<int64_t>(a.info->seq % a.s.n_results) * a.s.max_step_rows + result_of(a, f, s)) * a.s.max_top;
        float bound = INFINITY;
        int bound_index = -1;
        for (; n_best < wanted; ++n_best) {
            float v = -INFINITY;
            int index = 0x7fffffff;
            for (int i = threadIdx.x; i < a.n; i += kThreads) {
                const float x = logits[i];
                if (x < bound || (x == bound && i > bound_index)) better(v, index, x, i);
            }
            block_largest(v, index, sh.values, sh.indices);
            if (!(v > -INFINITY)) break;
            if (threadIdx.x == 0) out[n_best] = {index, static_cast<float>(static_cast<double>(v) - top - log_sum)};
            bound = v;
            bound_index = index;
        }
    }
    int token = top_index;
    if (f.is_scored) {
        token = at<int32_t>(a.s.tokens)[f.slot * (static_cast<int64_t>(a.s.max_ctx_tokens) + 1) + f.length];
        if (token < 0 || token >= a.n) token = 0;
    } else if (p.temperature > kGreedyTemperature && p.top_k != 1) {
        const double u = uniform(p.seed, f.length), factor = 1.0 / p.temperature;
        const bool has_top_k = p.top_k > 0 && p.top_k < a.n;
        if (!has_top_k && p.top_p >= 1.0f && p.min_p <= 0.0f && p.typical_p >= 1.0f) {
            double total = 0.0, before = 0.0;
            for (int i = 0; i < kParts; ++i) total += parts[i].sum_heated * exp((static_cast<double>(parts[i].largest) - top) * factor);
            const int size = part_size(a.n);
            int part = -1;
            for (int i = 0; i < kParts; ++i) {
                const double w = parts[i].sum_heated * exp((static_cast<double>(parts[i].largest) - top) * factor);
                if (w > 0.0 && (before + w > u * total || part < 0)) {
                    part = i;
                    if (before + w > u * total) break;
                }
                if (i + 1 < kParts) before += w;
            }
            const float heat = static_cast<float>(factor);
            const int found = find_sum(sh, part * size, min((part + 1) * size, a.n), u * total - before,
                                       [&](int i) { return static_cast<double>(__expf((logits[i] - top) * heat)); });
            token = found < 0 ? top_index : found;
        } else {
            const float heat = static_cast<float>(factor);
            uint32_t floor_key = 0;                  // tokens with a smaller logit are gone
            uint32_t typical_key = 0;                // tokens with a smaller typicality are gone
            float entropy = 0.0f, log_total = 0.0f;  // of what top-k left
            auto logit_key = [&](int i) { return ordered(logits[i]); };
            auto surprise_key = [&](int i) { return ordered(-fabsf(log_total - (logits[i] - top) * heat - entropy)); };
            auto is_kept = [&](int i) { return logits[i] > -INFINITY && logit_key(i) >= floor_key && (typical_key == 0 || surprise_key(i) >= typical_key); };
            auto weight = [&](int i) { return is_kept(i) ? expf((logits[i] - top) * heat) : 0.0f; };
            auto fixed = [&](int i) { return static_cast<unsigned long long>(weight(i) * 4294967296.0f); };
            auto total_fixed = [&] {
                unsigned long long mine = 0;
                for (int i = threadIdx.x; i < a.n; i += kThreads) mine += fixed(i);
                return block_sum64(sh, static_cast<double>(mine));
            };
            if (has_top_k)
                floor_key = threshold(sh, a.n, p.top_k, [&](int i) -> unsigned long long { return logits[i] > -INFINITY ? 1 : 0; }, logit_key);
            if (p.typical_p < 1.0f) {
                double mine = 0.0, heat_sum = 0.0;
                for (int i = threadIdx.x; i < a.n; i += kThreads) {
                    const double w = weight(i);
                    mine += w;
                    if (w > 0.0) heat_sum += w * (logits[i] - top) * heat;
                }
                const double total = block_sum64(sh, mine), mean = block_sum64(sh, heat_sum) / total;
                log_total = static_cast<float>(log(total));
                entropy = static_cast<float>(log(total) - mean);
                const double mass = total_fixed();
                typical_key = threshold(sh, a.n, static_cast<unsigned long long>(ceil(mass * p.typical_p)), fixed, surprise_key);
            }
            if (p.top_p < 1.0f) {
                const double mass = total_fixed();
                floor_key = max(floor_key, threshold(sh, a.n, static_cast<unsigned long long>(fmax(1.0, ceil(mass * p.top_p))), fixed, logit_key));
            }
            if (p.min_p > 0.0f) {
                float best = -INFINITY;
                int index = 0x7fffffff;
                for (int i = threadIdx.x; i < a.n; i += kThreads)
                    if (is_kept(i)) better(best, index, logits[i], i);
                block_largest(best, index, sh.values, sh.indices);
                floor_key = max(floor_key, ordered(best + logf(p.min_p) / heat));
            }
            double mine = 0.0;
            for (int i = threadIdx.x; i < a.n; i += kThreads) mine += weight(i);
            const double total = block_sum64(sh, mine);
            const int found = find_sum(sh, 0, a.n, u * total, [&](int i) { return static_cast<double>(weight(i)); });
            token = found < 0 ? top_index : found;
        }
    }
    publish(token, n_best << 16, p.n_logprobs >= 0 ? static_cast<float>(static_cast<double>(logits[token]) - top - log_sum) : 0.0f);
}

}  // namespace pk::sampling
