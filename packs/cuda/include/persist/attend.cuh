// Attention of one new token a row, from the product's raw q, k and v to the heads' outputs: norms, rotation, the new token's
// place in the pages, softmax(q.k) v.
//
// A block takes a range of positions of one KV head, its warps groups of 16 in turn. Keys and values of earlier tokens do not
// depend on this step: producers send them through the same rings as weights, so they are there before the query is, those of narrow heads in registers. They go
// from shared memory into mma operands (S^T = K q^T with positions on the M side, O^T = V^T P^T after a transposition in
// registers); each warp has sums of its own, joined in shared memory. Blocks that share a head leave packets and each join a part of its elements.
// Beside pages in F16 the raw q, k and v are F32, so that no number is rounded before it is turned. FP8 in pages becomes f16 in registers, and so do queries and weights; a head's gains (ADR 0018) count where it is placed and where its outputs are divided.
// Assumes: BF16, F16 or FP8 pages, equal widths of K and V (64, 128 or 256), at most eight heads a KV head; of heads of 256 no more than 128 elements are turned.
#pragma once
#include "arrival.cuh"
#include "kept.cuh"
#include "phase.h"
#include "stage.cuh"

namespace pk::persist {

__device__ __forceinline__ uint32_t transposed(uint32_t v) {
    uint32_t t;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(t) : "r"(v));
    return t;
}

// What products of q and k are multiplied with, and what becomes of them: logits in base 2, capped; without a division here, which would be a call.
__device__ __forceinline__ float logit_factor(const Attend &t) { return t.softcap > 0.0f ? __fdividef(t.scale, t.softcap) : t.scale * kLog2e; }
__device__ __forceinline__ float logit_of(const Attend &t, float product, float factor) {
    return t.softcap > 0.0f ? t.softcap * kLog2e * quick_tanh(product * factor) : product * factor;
}

template <int kD>
struct HeadSums {
    // Of heads 2c and 2c + 1. o[t][i] is of head 2c + i % 2 and of element 32 (t / 2) + 8 (r / 2) + 4 (t % 2) + 2 (i / 2) + r % 2; of FP8 64 (t / 4) + 16 (r / 2) + 4 (t % 4) + 2 (i / 2) + r % 2.
    float o[kD / 16][4], top[2], sum[2];
};

// Keys and values of 16 positions as mma operands, values transposed. Narrow heads' are in registers before the query is there.
template <int kD, Pages kPages>
struct Positions {
    static constexpr bool kIsAhead = kD <= 128;
    static constexpr int kRow = kRowBytes<kD, kPages>, kLoads = kRow / 64;  // of 16 bytes a lane and row
    uint4 keys[kIsAhead ? kLoads : 1][2];
    uint32_t values[kIsAhead ? kLoads : 1][8];  // FP8: as they came

    // Which of 16 positions is row r + 8 i of the operand: of two slots rows take one of each by turns.
    static __device__ __forceinline__ int position_of(int n_pieces, int r, int i) { return n_pieces == 2 ? (r >> 1) + 4 * i + 8 * (r & 1) : r + 8 * i; }
    // Rows of what lies in the next slots, or the last there is.
    static __device__ __forceinline__ void find(const Taker &taker, int n, int lane, const uint8_t *(&rows)[2]) {
        const int n_pieces = group_pieces(taker.slot_bytes, kRow / 2);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (i < n_pieces && n > 0) taker.await(i);
            const int row = max(0, min(position_of(n_pieces, lane >> 2, i), n - 1)), piece = n_pieces == 2 ? row >> 3 : 0;
            rows[i] = taker.slot_at(piece) + piece * piece_shift(taker.slot_bytes, kRow / 2) + (row - 8 * piece) * kRow + 16 * (lane & 3);
        }
    }
    static __device__ __forceinline__ void release(Taker &taker, int lane, uint32_t used) {
        __syncwarp();
#pragma unroll 1
        for (int i = 0; i < group_pieces(taker.slot_bytes, kRow / 2); ++i) taker.release(lane, used);
    }
    // n: positions there are of 16; of none nothing is waited for, and what is in registers does not matter.
    __device__ __forceinline__ void take(Taker &taker, int n, int lane) {
        const uint8_t *rows[2];
        uint32_t used = 0;
        find(taker, n, lane, rows);
#pragma unroll
        for (int j = 0; j < kLoads; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                keys[j][i] = *reinterpret_cast<const uint4 *>(rows[i] + 64 * j);
                used ^= keys[j][i].x ^ keys[j][i].w;
            }
        if (n > 0) release(taker, lane, used);
        find(taker, n, lane, rows);
#pragma unroll
        for (int j = 0; j < kLoads; ++j) {
            const uint4 x = *reinterpret_cast<const uint4 *>(rows[0] + 64 * j), y = *reinterpret_cast<const uint4 *>(rows[1] + 64 * j);
            const uint32_t raw[8] = {x.x, x.y, y.x, y.y, x.z, x.w, y.z, y.w};
#pragma unroll
            for (int i = 0; i < 8; ++i) values[j][i] = kPages == kInFp8 ? raw[i] : transposed(raw[i]);
            used ^= x.x ^ x.w ^ y.x ^ y.w;
        }
        if (n > 0) release(taker, lane, used);
    }
};

// One warp over its groups of 16 positions, which come through its ring: keys, then values. The first ones have been taken.
template <int kD, Pages kPages>
__device__ __forceinline__ void attend_range(const Phase &p, const Span &span, int position, const uint8_t *area, Taker &taker, Positions<kD, kPages> &group, HeadSums<kD> &h) {
    using Group = Positions<kD, kPages>;
    using As = Kept<kPages>;
    constexpr bool kIsAhead = Group::kIsAhead;
    const Attend &t = p.attend;
    const int lane = thread_here() & 31, warp = thread_here() >> 5, r = lane >> 2, c = lane & 3, n_pieces = group_pieces(taker.slot_bytes, Group::kRow / 2), least = t.window > 0 ? position - t.window + 1 : 0;
    const uint8_t *q = area + r * head_bytes(kD) + (kPages == kInFp8 ? 32 : 16) * c;
    const bool is_capped = t.softcap > 0.0f;
    const float factor = logit_factor(t);
#pragma unroll
    for (int i = 0; i < kD / 16; ++i) h.o[i][0] = h.o[i][1] = h.o[i][2] = h.o[i][3] = 0.0f;
    h.top[0] = h.top[1] = -INFINITY;
    h.sum[0] = h.sum[1] = 0.0f;
    int at = span.first + warp * 16;
#pragma unroll 1
    while (at < span.last) {
        const uint8_t *rows[2];
        float s[4] = {0.0f, 0.0f, 0.0f, 0.0f}, other[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        if constexpr (!kIsAhead) Group::find(taker, span.last - at, lane, rows);
#pragma unroll
        for (int j = 0; j < Group::kLoads; ++j) {
            const uint4 k = kIsAhead ? group.keys[kIsAhead ? j : 0][0] : *reinterpret_cast<const uint4 *>(rows[0] + 64 * j);
            const uint4 l = kIsAhead ? group.keys[kIsAhead ? j : 0][1] : *reinterpret_cast<const uint4 *>(rows[1] + 64 * j);
            if constexpr (kPages == kInFp8) {
                const uint4 x = *reinterpret_cast<const uint4 *>(q + 128 * j), y = *reinterpret_cast<const uint4 *>(q + 128 * j + 16);
                As::multiply(s, widened(k.x, 0), widened(l.x, 0), widened(k.x, 1), widened(l.x, 1), x.x, x.y);
                As::multiply(other, widened(k.y, 0), widened(l.y, 0), widened(k.y, 1), widened(l.y, 1), x.z, x.w);
                As::multiply(s, widened(k.z, 0), widened(l.z, 0), widened(k.z, 1), widened(l.z, 1), y.x, y.y);
                As::multiply(other, widened(k.w, 0), widened(l.w, 0), widened(k.w, 1), widened(l.w, 1), y.z, y.w);
            } else {
                const uint4 x = *reinterpret_cast<const uint4 *>(q + 64 * j);
                As::multiply(s, k.x, l.x, k.y, l.y, x.x, x.y);
                As::multiply(other, k.z, l.z, k.w, l.w, x.z, x.w);
            }
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) s[e] += other[e];
        if constexpr (!kIsAhead) Group::release(taker, lane, __float_as_uint(s[0]) ^ __float_as_uint(s[1]) ^ __float_as_uint(s[2]) ^ __float_as_uint(s[3]));
        if (is_capped) {
#pragma unroll 1
            for (int e = 0; e < 4; ++e) {
                const float v = logit_of(t, s[0], factor);
                s[0] = s[1]; s[1] = s[2]; s[2] = s[3]; s[3] = v;
            }
        } else {
#pragma unroll
            for (int e = 0; e < 4; ++e) s[e] *= factor;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int one = at + Group::position_of(n_pieces, r, i);
            if (one >= span.last || one < least) s[2 * i] = s[2 * i + 1] = -INFINITY;
        }
        uint32_t weights[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            float most = fmaxf(s[e], s[e + 2]);
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 4));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 8));
            most = fmaxf(fmaxf(most, __shfl_xor_sync(~0u, most, 16)), h.top[e]);
            // None of these positions may lie in the window.
            const float zero = most == -INFINITY ? 0.0f : most, fade = power2(h.top[e] - zero);
            h.top[e] = most;
            s[e] = power2(s[e] - zero);
            s[e + 2] = power2(s[e + 2] - zero);
            h.sum[e] = h.sum[e] * fade + s[e] + s[e + 2];
            if (at > span.first + warp * 16)
#pragma unroll
                for (int i = 0; i < kD / 16; ++i) {
                    h.o[i][e] *= fade;
                    h.o[i][e + 2] *= fade;
                }
        }
        weights[0] = transposed(As::pack(s[0], s[1]));
        weights[1] = transposed(As::pack(s[2], s[3]));
        // Words of two rows that lie side by side: raw FP8 of four elements.
        auto add_wide = [&](int i, uint32_t x, uint32_t y) {
            As::multiply(h.o[i], transposed(widened(x, 0)), transposed(widened(x, 1)), transposed(widened(y, 0)), transposed(widened(y, 1)), weights[0], weights[1]);
        };
        if constexpr (kIsAhead) {
#pragma unroll
            for (int i = 0; i < kD / 16; ++i) {
                if constexpr (kPages == kInFp8) {
                    const uint32_t(&v)[8] = group.values[i / 4];
                    add_wide(i, v[i % 4 / 2 * 4 + i % 2], v[i % 4 / 2 * 4 + i % 2 + 2]);
                } else {
                    const uint32_t(&v)[8] = group.values[i / 2];
                    As::multiply(h.o[i], v[i % 2 * 4], v[i % 2 * 4 + 1], v[i % 2 * 4 + 2], v[i % 2 * 4 + 3], weights[0], weights[1]);
                }
            }
            at += 16 * kWarps;
            if (at >= span.last) break;
            group.take(taker, span.last - at, lane);
        } else {
            Group::find(taker, span.last - at, lane, rows);
#pragma unroll
            for (int j = 0; j < Group::kLoads; ++j) {
                const uint4 x = *reinterpret_cast<const uint4 *>(rows[0] + 64 * j), y = *reinterpret_cast<const uint4 *>(rows[1] + 64 * j);
                if constexpr (kPages == kInFp8) {
                    add_wide(4 * j, x.x, y.x);
                    add_wide(4 * j + 1, x.y, y.y);
                    add_wide(4 * j + 2, x.z, y.z);
                    add_wide(4 * j + 3, x.w, y.w);
                } else {
                    As::multiply(h.o[2 * j], transposed(x.x), transposed(x.y), transposed(y.x), transposed(y.y), weights[0], weights[1]);
                    As::multiply(h.o[2 * j + 1], transposed(x.z), transposed(x.w), transposed(y.z), transposed(y.w), weights[0], weights[1]);
                }
            }
            uint32_t used = 0;
#pragma unroll
            for (int i = 0; i < kD / 16; ++i) used ^= __float_as_uint(h.o[i][0]) ^ __float_as_uint(h.o[i][2]);
            Group::release(taker, lane, used);
            at += 16 * kWarps;
        }
    }
#pragma unroll
    for (int e = 0; e < 2; ++e)
#pragma unroll
        for (int o = 4; o < 32; o <<= 1) h.sum[e] += __shfl_xor_sync(~0u, h.sum[e], o);
}

// The new token's logit for a head a warp; warps that may have no positions first.
template <int kD, Pages kPages>
__device__ __forceinline__ void meet_new(const Attend &t, uint8_t *area) {
    const int lane = thread_here() & 31, head = kWarps - 1 - (thread_here() >> 5);
    if (head >= t.n_heads / t.n_kv_heads) return;
    float sum = 0.0f;
    if (4 * lane < kD)
#pragma unroll
        for (int k = 0; k < Turn<kD>::kParts; ++k) {
            const uint2 q = *reinterpret_cast<const uint2 *>(area + head * head_bytes(kD) + 256 * k + 8 * lane), n = *reinterpret_cast<const uint2 *>(area + new_at(kD) + 256 * k + 8 * lane);
            const float2 a = Kept<kPages>::unpack(q.x), b = Kept<kPages>::unpack(n.x), c = Kept<kPages>::unpack(q.y), d = Kept<kPages>::unpack(n.y);
            sum = fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(c.x, d.x, fmaf(c.y, d.y, sum))));
        }
    sum = warp_sum(sum);
    if (lane == 0) reinterpret_cast<float *>(area + logits_at(kD))[head] = logit_of(t, sum, logit_factor(t));
}

// What gates a pair of neighbours, asked for early; nothing where outputs are not gated.
__device__ __forceinline__ const uint8_t *gate_at(const Phase &p, int64_t at) { return p.add.packets ? added_at(p.add, at) : nullptr; }
__device__ __forceinline__ uint2 ask_gate(const uint8_t *from) { return from != nullptr ? load_packet(from) : make_uint2(0, 0); }

// Two neighbours, by whole warps; at: of the first one in the row.
__device__ __forceinline__ void write_heads(const Phase &p, int64_t at, float2 o, uint32_t epoch) {
    if (p.folded_y) {
        const float folded[2] = {o.x, o.y};
        put_folded<2>(reinterpret_cast<uint8_t *>(p.folded_y) + at / 32 * kFoldedBytes, folded, 0.0f, epoch, p.folded_staging == kStageBytes);
    }
    write_pair(p.y, at, o, epoch);
}

// Two neighbours of a head: what all positions gave, divided by the sum of weights, the head's sink among them; then gated. at: of the first one
// in the row; gate: what was there of their packet; gated: that packet's epoch.
template <Pages kPages>
__device__ __forceinline__ void put_outputs(const Phase &p, int head, int64_t at, float2 o, float sum, float top, uint32_t epoch, uint2 gate, uint32_t gated) {
    const Attend &t = p.attend;
    if (t.sinks != nullptr) {
        const float sink = __ldg(t.sinks + head) * kLog2e, joint = fmaxf(top, sink), fade = power2(top - joint);
        o.x *= fade;
        o.y *= fade;
        sum = sum * fade + power2(sink - joint);
    }
    float share = __fdividef(1.0f, sum);
    if (kPages == kInFp8 && t.out_gains != nullptr) share *= __ldg(t.out_gains + head);
    o.x *= share;
    o.y *= share;
    if (const uint8_t *from = gate_at(p, at); from != nullptr) {
        if (gate.y != gated) gate = await_packet(from, gated);
        o.x = __fdividef(o.x, 1.0f + __expf(-low_f32(gate.x)));
        o.y = __fdividef(o.y, 1.0f + __expf(-high_f32(gate.x)));
        __syncwarp();
    }
    write_heads(p, at, o, epoch);
}

// Joins the warps, which leave their sums as they are; then writes the heads, or leaves them for the blocks that share them, each of which joins a part.
template <int kD, Pages kPages>
__device__ __forceinline__ void join_warps(const Phase &p, const Arguments &a, const Span &span, uint8_t *area, const HeadSums<kD> &h, uint32_t epoch, uint32_t gated, int phase, Taker &taker) {
    constexpr int kOnce = heads_once(kD), kHead = head_floats(kD);
    const int tid = thread_here(), lane = tid & 31, warp = tid >> 5, r = lane >> 2, c = lane & 3, group = p.attend.n_heads / p.attend.n_kv_heads;
    // Heads whose sums lie side by side: all of them where x of other phases has taken room for that, so that the warps meet once.
    const bool is_whole = group > kOnce && group <= 2 * kOnce && scratch_at(kD) + 4 * kWarps * 2 * kOnce * kHead <= a.x_bytes;
    const int held = is_whole ? 2 * kOnce : kOnce;
    float *scratch = reinterpret_cast<float *>(area + scratch_at(kD));
    float2 *facts = reinterpret_cast<float2 *>(area + facts_at(kD));  // [heads][warps] (largest logit, sum)
    if (r == 0)
#pragma unroll
        for (int e = 0; e < 2; ++e) facts[(2 * c + e) * kWarps + warp] = make_float2(h.top[e], h.sum[e]);
    // Packets of this range: sums of every element of the group's heads, then the heads' largest logits and sums of weights.
    constexpr int kRange = 8 * kD + 16;
    uint8_t *ranges = a.partial + static_cast<int64_t>(blockIdx.x - span.split) * kRange * 8;
    const int64_t first_at = static_cast<int64_t>(span.head) * group * kD;
#pragma unroll 1
    for (int first = 0; first < group; first += kOnce) {
        const bool is_left = first > 0 && is_whole;
        if (first > 0 && !is_whole) join_consumers(kConsumers);
        if (!is_left && 2 * c >= first && 2 * c < first + held)
#pragma unroll
            for (int e = 0; e < 2; ++e)
#pragma unroll
                for (int j = 0; j < kD / 32; ++j)
                    *reinterpret_cast<float4 *>(scratch + (warp * held + 2 * c + e - first) * kHead + 36 * j + 4 * r) =
                        make_float4(h.o[2 * j][e], h.o[2 * j][e + 2], h.o[2 * j + 1][e], h.o[2 * j + 1][e + 2]);
        // Every thread has two neighbours of a head.
        const int in = tid / (kD / 2), head = first + in, d = 2 * (tid % (kD / 2));
        const int64_t at = first_at + head * kD + d;
        // Of a pair of blocks one writes even heads, the other odd ones.
        const bool is_own = span.n_splits == 1 || (span.is_paired && (head & 1) == span.split);
        const uint2 gate = head < group && is_own ? ask_gate(gate_at(p, at)) : make_uint2(0, 0);
        const int pass = first > 0;
        if (span.is_paired && tid == 0) {
            const int n_own = (min(group - first, kOnce) + 1 - span.split) / 2;
            barrier_expect(taker.paired + 8 * pass, n_own * (8 * kD / 2 + 8));
        }
        if (!is_left) join_consumers(kConsumers);
        mark(phase, 2);
        if (head >= group) continue;  // whole warps
        float top[kWarps], sums[kWarps];
#pragma unroll
        for (int w = 0; w < kWarps; w += 2) {
            const float4 f = *reinterpret_cast<const float4 *>(facts + head * kWarps + w);
            top[w] = f.x; sums[w] = f.y; top[w + 1] = f.z; sums[w + 1] = f.w;
        }
        const float fresh = span.split + 1 == span.n_splits ? reinterpret_cast<const float *>(area + logits_at(kD))[head] : -INFINITY;
        float most = fresh;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) most = fmaxf(most, top[w]);
        const uint32_t value = *reinterpret_cast<const uint32_t *>(area + new_at(kD) + 2 * kD + 2 * d);
        float sum = power2(fresh - most);
        const float2 last = Kept<kPages>::unpack(value);
        float2 o = fresh > -INFINITY ? make_float2(sum * last.x, sum * last.y) : make_float2(0.0f, 0.0f);
        const float *from = scratch + (in + (is_left ? first : 0)) * kHead + d % 8 / 2 + (kPages == kInFp8 ? 36 * (d / 64 * 2 + d % 16 / 8) + d % 64 / 16 * 8 : 36 * (d / 32) + d % 32 / 8 * 8);
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
            const float factor = power2(top[w] - most);
            sum = fmaf(factor, sums[w], sum);
            o.x = fmaf(factor, from[w * held * kHead], o.x);
            o.y = fmaf(factor, from[w * held * kHead + 4], o.y);
        }
        if (span.is_paired) {
            const uint32_t barrier = taker.paired + 8 * pass, there = taker.exchange + 8 * (head / 2 * (kD / 2) + d / 2), facts_there = taker.exchange + 8 * (kPairedFacts + head / 2);
            if (!is_own) {
                send_other(there, o, barrier);
                if (d == 0) send_other(facts_there, make_float2(most, sum), barrier);
            } else {
                barrier_wait(barrier, taker.pair_parity >> pass & 1);
                const float2 other = load_shared2(there), fact = load_shared2(facts_there);
                const float joint = fmaxf(most, fact.x), here = power2(most - joint), beyond = power2(fact.x - joint);
                put_outputs<kPages>(p, span.head * group + head, at, make_float2(fmaf(other.x, beyond, o.x * here), fmaf(other.y, beyond, o.y * here)), fmaf(fact.y, beyond, sum * here), joint, epoch, gate, gated);
            }
            continue;
        }
        if (span.n_splits == 1) {
            put_outputs<kPages>(p, span.head * group + head, at, o, sum, most, epoch, gate, gated);
            continue;
        }
        uint8_t *to = ranges + static_cast<int64_t>(span.split) * kRange * 8;
        store_packets2(to + (head * kD + d) * 8, __float_as_uint(o.x), __float_as_uint(o.y), epoch);
        if (d == 0) store_packets2(to + (8 * kD + 2 * head) * 8, __float_as_uint(most), __float_as_uint(sum), epoch);
    }
    mark(phase, 6);
    if (span.is_paired) taker.pair_parity ^= group > kOnce ? 3 : 1;
    if (span.is_paired || span.n_splits == 1) return;
    // Every block of the row joins a part of the elements, warps at a time; a lane asks for one range's largest logits and sums.
    const int n_parts = group * kD / 64;
#pragma unroll 1
    for (int j = span.split + warp * span.n_splits; j < n_parts; j += kWarps * span.n_splits) {
        const int head = j * 64 / kD, d = j * 64 % kD + 2 * lane;
        const uint8_t *value_at = ranges + (head * kD + d) * 8;
        const int64_t at = first_at + head * kD + d;
        const uint2 gate = ask_gate(gate_at(p, at));
        // The first values are asked for with the facts: a trip less.
        uint4 facts = {};
        uint4 v[8];
        auto ask = [&](int first) {
            bool ok = true;
#pragma unroll
            for (int k = 0; k < 8; ++k) v[k] = load_packets2(value_at + static_cast<int64_t>(min(first + k, span.n_splits - 1)) * kRange * 8);
#pragma unroll
            for (int k = 0; k < 8; ++k) ok &= v[k].y == epoch && v[k].w == epoch;
            return ok;
        };
        bool is_there;
        do {
            if (lane < span.n_splits) facts = load_packets2(ranges + (static_cast<int64_t>(lane) * kRange + 8 * kD + 2 * head) * 8);
            is_there = ask(0) && (lane >= span.n_splits || (facts.y == epoch && facts.w == epoch));
        } while (!is_there);
        __syncwarp();
        const float top = lane < span.n_splits ? __uint_as_float(facts.x) : -INFINITY;
        float most = top;
#pragma unroll
        for (int o = 16; o; o >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
        const float scale = power2(top - most), sum = warp_sum(lane < span.n_splits ? scale * __uint_as_float(facts.z) : 0.0f);
        float2 o = make_float2(0.0f, 0.0f);
#pragma unroll 1
        for (int first = 0; first < span.n_splits; first += 8) {
            if (first > 0)
                while (!ask(first)) {
                }
            __syncwarp();
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                const float factor = first + k < span.n_splits ? __shfl_sync(~0u, scale, first + k) : 0.0f;
                o.x = fmaf(__uint_as_float(v[k].x), factor, o.x);
                o.y = fmaf(__uint_as_float(v[k].z), factor, o.y);
            }
        }
        put_outputs<kPages>(p, span.head * group + head, at, o, sum, most, epoch, gate, gated);
    }
}

// area: attend_bytes of shared memory. base: phases before this launch; at: this phase.
template <int kD, Pages kPages>
__device__ __forceinline__ void attend_as(const Phase &p, const Arguments &a, const RowFacts &facts, uint8_t *area, Taker &taker, uint32_t base, int at) {
    const Attend &t = p.attend;
    const Span span = span_of(t, facts.position, a.paired);
    if (span.head < 0) return;
    if (facts.is_dead) {
        const int n = t.n_heads / t.n_kv_heads * kD;
        if (span.split == 0)
#pragma unroll 1
            for (int j = 2 * thread_here(); j < n; j += 2 * kConsumers) write_heads(p, static_cast<int64_t>(span.head) * n + j, make_float2(0.0f, 0.0f), base + at + 1);
        return;
    }
    // All that does not depend on the query before it comes.
    Positions<kD, kPages> group;
    Arrival<kD, kPages> arrival;
    const int lane = thread_here() & 31, warp = thread_here() >> 5, mine = span.first + warp * 16;
    arrival.prepare(p, span, min(warp, t.n_heads / t.n_kv_heads + 1), lane);
    if constexpr (Positions<kD, kPages>::kIsAhead)
        group.take(taker, span.last - mine, lane);
    arrival.turn.work_out(t, facts.position, lane);
    // Asked for anew while the warps meet.
    if (!arrival.is_there(base + p.x.source + 1)) arrival.ask();
    mark(at, 7);
    join_consumers(kConsumers);  // nobody multiplies any more with what lies here
    mark(at, 3);
    place_new<kD, kPages>(p, a, span, facts, area, base + p.x.source + 1, arrival);
    mark(at, 1);
    join_consumers(kConsumers);
    HeadSums<kD> sums;
    if (span.split + 1 == span.n_splits) meet_new<kD, kPages>(t, area);
    attend_range<kD, kPages>(p, span, facts.position, area, taker, group, sums);
    mark(at, 4);
    join_warps<kD, kPages>(p, a, span, area, sums, base + at + 1, base + p.add.source + 1, at, taker);
    mark(at, 5);
}

template <int kD, Sort kSort>
__device__ __forceinline__ void attend(const Phase &p, const Arguments &a, const RowFacts &facts, uint8_t *area, Taker &taker, uint32_t base, int at) {
    if constexpr (kSort == kHalfPages) attend_as<kD, kInF16>(p, a, facts, area, taker, base, at);
    else if (!is_lean(kSort) && p.attend.is_fp8) attend_as<kD, kInFp8>(p, a, facts, area, taker, base, at);
    else attend_as<kD, kInBf16>(p, a, facts, area, taker, base, at);
}

template <Sort kSort>
__device__ __forceinline__ void attend_any(const Phase &p, const Arguments &a, const RowFacts &facts, uint8_t *area, Taker &taker, uint32_t base, int at) {
    if (is_lean(kSort) || p.attend.head_width == 128) attend<128, kSort>(p, a, facts, area, taker, base, at);
    else if (p.attend.head_width == 256) attend<256, kSort>(p, a, facts, area, taker, base, at);
    else attend<64, kSort>(p, a, facts, area, taker, base, at);
}

}  // namespace pk::persist
