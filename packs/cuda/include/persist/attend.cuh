// Attention of one new token a row, from the product's raw q, k and v to the heads' outputs: norms, rotation, the new token's
// place in the pages, softmax(q.k) v.
//
// A block takes a range of positions of one KV head, its warps groups of 16 in turn. Keys and values of earlier tokens do not
// depend on this step: producers send them through the same rings as weights, so they are there before the query is. They go
// from shared memory into mma operands (S^T = K q^T with positions on the M side, O^T = V^T P^T after a transposition in
// registers); each warp has sums of its own, joined in shared memory. Blocks that share a head leave packets and each join a part of its elements.
// Assumes: BF16 pages, equal widths of K and V (64, 128 or 256), at most eight heads a KV head; of heads of 256 no more than 128 elements are turned.
#pragma once
#include "../attention.cuh"
#include "phase.h"
#include "stage.cuh"

namespace pk::persist {

__device__ __forceinline__ uint32_t transposed(uint32_t v) {
    uint32_t t;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(t) : "r"(v));
    return t;
}

// What a block does: positions [first, last) of a KV head, in groups of 16 that begin at multiples of 16. None: head < 0.
struct Span {
    int head, split, n_splits, first, last;
};
__device__ __forceinline__ Span span_of(const Attend &t, int position) {
    const int most = min(32, max(1, static_cast<int>(gridDim.x) / t.n_kv_heads)), head = blockIdx.x / most, split = blockIdx.x - head * most;
    const int begin = t.window > 0 ? max(0, position - t.window + 1) & ~15 : 0, n = position + 1 - begin, groups = (n + 15) / 16;
    const int wanted = min(most, (groups + kWarps - 1) / kWarps), each = (groups + wanted - 1) / wanted, n_splits = (groups + each - 1) / each;
    if (head >= t.n_kv_heads || split >= n_splits) return {-1, 0, 0, 0, 0};
    const int first = begin + split * each * 16;
    return {head, split, n_splits, first, min(position + 1, first + each * 16)};
}

// Four neighbouring elements of a head a lane, of wider heads four more that are not turned. What a lane needs of the norm and the rotation is asked
// and worked out before the head is there.
template <int kD>
struct Turn {
    static constexpr int kParts = kD > 128 ? kD / 128 : 1;
    float norm[kParts][4], sine[4], cosine[4];
    int partner;  // lane that holds the other halves of pairs
    __device__ __forceinline__ void prepare(const Attend &t, const float *weights, int position, int lane) {
        const int e = 4 * lane, half = t.rope_width / 2;
        const bool is_head = e < kD, is_turned = t.frequency != nullptr && e < t.rope_width;
#pragma unroll
        for (int k = 0; k < kParts; ++k) {
            const float4 n = weights != nullptr && is_head ? __ldg(reinterpret_cast<const float4 *>(weights) + 32 * k + lane) : make_float4(1.0f, 1.0f, 1.0f, 1.0f);
            norm[k][0] = n.x; norm[k][1] = n.y; norm[k][2] = n.z; norm[k][3] = n.w;
        }
        partner = !is_turned || t.rope_layout ? lane : e < half ? lane + half / 4 : lane - half / 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int k = !is_turned ? 0 : t.rope_layout ? (e + i) / 2 : e < half ? e + i : e + i - half;
            // Whole turns go away in double: angles reach the length of the context.
            const double angle = is_turned ? static_cast<float>(position) * __ldg(t.frequency + k) : 0.0f;
            const float rest = static_cast<float>(angle - rint(angle * 0.15915494309189535) * 6.283185307179586);
            const float size = is_turned ? t.magnitude : 1.0f, sign = (t.rope_layout ? !(i & 1) : e < half) ? -size : size;
            sine[i] = __sinf(rest) * sign;
            cosine[i] = __cosf(rest) * size;
        }
    }
    __device__ __forceinline__ void turn(const Attend &t, bool has_norm, float (&v)[kParts][4]) const {
        if (has_norm) {
            float squares = 0.0f;
#pragma unroll
            for (int k = 0; k < kParts; ++k) squares += v[k][0] * v[k][0] + v[k][1] * v[k][1] + v[k][2] * v[k][2] + v[k][3] * v[k][3];
            const float r = rsqrtf(warp_sum(squares) * (1.0f / kD) + t.eps);
#pragma unroll
            for (int k = 0; k < kParts; ++k)
#pragma unroll
                for (int i = 0; i < 4; ++i) v[k][i] *= r * norm[k][i];
        }
        float other[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) other[i] = t.rope_layout ? v[0][i ^ 1] : __shfl_sync(~0u, v[0][i], partner);
#pragma unroll
        for (int i = 0; i < 4; ++i) v[0][i] = v[0][i] * cosine[i] + other[i] * sine[i];
    }
};

// q of this KV head's group into shared memory, and the new token's k and v into shared memory and its page when the range holds it.
template <int kD>
__device__ __forceinline__ void place_new(const Phase &p, const Arguments &a, const Span &span, const RowFacts &facts, uint8_t *area, uint32_t epoch) {
    const Attend &t = p.attend;
    const int lane = thread_here() & 31, warp = thread_here() >> 5, group = t.n_heads / t.n_kv_heads;
    const bool is_head = 4 * lane < kD, is_last = span.split + 1 == span.n_splits;
    constexpr int kParts = Turn<kD>::kParts;
    if (is_head && group + warp < 8)
#pragma unroll
        for (int k = 0; k < kParts; ++k) *reinterpret_cast<uint2 *>(area + (group + warp) * head_bytes(kD) + 256 * k + 8 * lane) = make_uint2(0, 0);
#pragma unroll 1
    for (int task = warp; task < (is_last ? group + 2 : group); task += kWarps) {
        const bool is_q = task < group, is_v = task == group + 1;
        const int head = is_q ? span.head * group + task : t.n_heads + (is_v ? t.n_kv_heads : 0) + span.head;
        const float *norm = is_v ? nullptr : is_q ? t.q_norm : t.k_norm;
        Turn<kD> turn;
        turn.prepare(t, norm, facts.position, lane);
        const uint8_t *from = packet_at<false>(p.x.packets, static_cast<int64_t>(head) * kD) + 16 * lane;
        float v[kParts][4] = {};
        if (is_head)
#pragma unroll
            for (int k = 0; k < kParts; ++k)
                while (!load4<false>(from + 512 * k, epoch, v[k])) {
                }
        __syncwarp();
        if (!is_v) turn.turn(t, norm != nullptr, v);
        if (!is_head) continue;
#pragma unroll
        for (int k = 0; k < kParts; ++k) {
            const uint2 packed = make_uint2(pack_bf16(v[k][0], v[k][1]), pack_bf16(v[k][2], v[k][3]));
            *reinterpret_cast<uint2 *>(area + (is_q ? task * head_bytes(kD) : new_at(kD) + is_v * 2 * kD) + 256 * k + 8 * lane) = packed;
            if (!is_q) {
                const int64_t at = (static_cast<int64_t>(span.head) * a.page_tokens + facts.position % a.page_tokens) * (2 * kD);
                *reinterpret_cast<uint2 *>(a.kv + static_cast<int64_t>(facts.page) * a.page_stride + (is_v ? t.v_offset : t.k_offset) + at + 256 * k + 8 * lane) = packed;
            }
        }
    }
}

template <int kD>
struct HeadSums {
    // Of heads 2c and 2c + 1. o[t][i] is of head 2c + i % 2 and of element 32 (t / 2) + 8 (r / 2) + 4 (t % 2) + 2 (i / 2) + r % 2.
    float o[kD / 16][4], top[2], sum[2];
};

// One warp over its groups of 16 positions, which come through its ring: keys, then values.
template <int kD>
__device__ __forceinline__ void attend_range(const Phase &p, const Span &span, int position, const uint8_t *area, Taker &taker, HeadSums<kD> &h) {
    const Attend &t = p.attend;
    const int lane = thread_here() & 31, warp = thread_here() >> 5, r = lane >> 2, c = lane & 3, n_pieces = group_pieces(taker.slot_bytes, kD), least = t.window > 0 ? position - t.window + 1 : 0;
    const uint8_t *q = area + r * head_bytes(kD) + 16 * c;
    const bool is_capped = t.softcap > 0.0f;
    const float factor = is_capped ? __fdividef(t.scale, t.softcap) : t.scale * kLog2e;
#pragma unroll
    for (int i = 0; i < kD / 16; ++i) h.o[i][0] = h.o[i][1] = h.o[i][2] = h.o[i][3] = 0.0f;
    h.top[0] = h.top[1] = -INFINITY;
    h.sum[0] = h.sum[1] = 0.0f;
#pragma unroll 1
    for (int at = span.first + warp * 16; at < span.last; at += 16 * kWarps) {
        // Rows r and r + 8 of the group's keys or values, or the last there is; the new token's own is not in memory yet.
        auto find = [&](bool is_v, const uint8_t *(&rows)[2]) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (i < n_pieces) taker.await(i);
                const int row = min(r + 8 * i, span.last - 1 - at);
                rows[i] = (at + row == position ? area + new_at(kD) + is_v * 2 * kD : taker.slot_at(n_pieces == 2 ? row >> 3 : 0) + (n_pieces == 2 ? row & 7 : row) * (2 * kD)) + 16 * c;
            }
        };
        auto release = [&](uint32_t used) {
            __syncwarp();
#pragma unroll 1
            for (int i = 0; i < n_pieces; ++i) taker.release(lane, used);
        };
        const uint8_t *rows[2];
        find(false, rows);
        float s[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < kD / 32; ++j) {
            const uint4 x = *reinterpret_cast<const uint4 *>(q + 64 * j), k = *reinterpret_cast<const uint4 *>(rows[0] + 64 * j), l = *reinterpret_cast<const uint4 *>(rows[1] + 64 * j);
            mma_bf16(s, k.x, l.x, k.y, l.y, x.x, x.y);
            mma_bf16(s, k.z, l.z, k.w, l.w, x.z, x.w);
        }
        release(__float_as_uint(s[0]) ^ __float_as_uint(s[1]) ^ __float_as_uint(s[2]) ^ __float_as_uint(s[3]));
        // Logits in base 2, capped; without a division here, which would be a call.
#pragma unroll
        for (int e = 0; e < 4; ++e) s[e] = is_capped ? t.softcap * kLog2e * quick_tanh(s[e] * factor) : s[e] * factor;
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (at + r + 8 * i >= span.last || at + r + 8 * i < least) s[2 * i] = s[2 * i + 1] = -INFINITY;
        uint32_t weights[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            float most = fmaxf(s[e], s[e + 2]);
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 4));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 8));
            most = fmaxf(fmaxf(most, __shfl_xor_sync(~0u, most, 16)), h.top[e]);
            const float fade = h.top[e] == most ? 1.0f : power2(h.top[e] - most);
            h.top[e] = most;
            s[e] = power2(s[e] - most);
            s[e + 2] = power2(s[e + 2] - most);
            h.sum[e] = h.sum[e] * fade + s[e] + s[e + 2];
#pragma unroll
            for (int i = 0; i < kD / 16; ++i) {
                h.o[i][e] *= fade;
                h.o[i][e + 2] *= fade;
            }
        }
        weights[0] = transposed(pack_bf16(s[0], s[1]));
        weights[1] = transposed(pack_bf16(s[2], s[3]));
        find(true, rows);
#pragma unroll
        for (int j = 0; j < kD / 32; ++j) {
            const uint4 x = *reinterpret_cast<const uint4 *>(rows[0] + 64 * j), y = *reinterpret_cast<const uint4 *>(rows[1] + 64 * j);
            mma_bf16(h.o[2 * j], transposed(x.x), transposed(x.y), transposed(y.x), transposed(y.y), weights[0], weights[1]);
            mma_bf16(h.o[2 * j + 1], transposed(x.z), transposed(x.w), transposed(y.z), transposed(y.w), weights[0], weights[1]);
        }
        uint32_t used = 0;
#pragma unroll
        for (int i = 0; i < kD / 16; ++i) used ^= __float_as_uint(h.o[i][0]) ^ __float_as_uint(h.o[i][2]);
        release(used);
    }
#pragma unroll
    for (int e = 0; e < 2; ++e)
#pragma unroll
        for (int o = 4; o < 32; o <<= 1) h.sum[e] += __shfl_xor_sync(~0u, h.sum[e], o);
}

// What gates a pair of neighbours, asked for early; nothing where outputs are not gated.
__device__ __forceinline__ const uint8_t *gate_at(const Phase &p, int64_t at) { return p.add.packets ? added_at(p.add, at) : nullptr; }
__device__ __forceinline__ uint2 ask_gate(const uint8_t *from) { return from != nullptr ? load_packet(from) : make_uint2(0, 0); }

// Two neighbours of a head: what all positions gave, divided by the sum of weights, the head's sink among them; then gated. at: of the first one
// in the row; gate: what was there of their packet; gated: that packet's epoch.
__device__ __forceinline__ void put_outputs(const Phase &p, int head, int64_t at, float2 o, float sum, float top, uint32_t epoch, uint2 gate, uint32_t gated) {
    const Attend &t = p.attend;
    if (t.sinks != nullptr) {
        const float sink = __ldg(t.sinks + head) * kLog2e, joint = fmaxf(top, sink), fade = power2(top - joint);
        o.x *= fade;
        o.y *= fade;
        sum = sum * fade + power2(sink - joint);
    }
    float share = __fdividef(1.0f, sum);
    o.x *= share;
    o.y *= share;
    if (const uint8_t *from = gate_at(p, at); from != nullptr) {
        if (gate.y != gated) gate = await_packet(from, gated);
        o.x = __fdividef(o.x, 1.0f + __expf(-low_f32(gate.x)));
        o.y = __fdividef(o.y, 1.0f + __expf(-high_f32(gate.x)));
    }
    write_pair(p.y, at, o, epoch);
}

// Joins the warps, which leave their sums as they are; then writes the heads, or leaves them for the blocks that share them, each of which joins a part.
template <int kD>
__device__ __forceinline__ void join_warps(const Phase &p, const Arguments &a, const Span &span, uint8_t *area, const HeadSums<kD> &h, uint32_t epoch, uint32_t gated, int phase) {
    constexpr int kOnce = heads_once(kD), kHead = head_floats(kD);
    const int tid = thread_here(), lane = tid & 31, warp = tid >> 5, r = lane >> 2, c = lane & 3, group = p.attend.n_heads / p.attend.n_kv_heads;
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
        if (first > 0) join_consumers(kConsumers);
        if (2 * c >= first && 2 * c < first + kOnce)
#pragma unroll
            for (int e = 0; e < 2; ++e)
#pragma unroll
                for (int j = 0; j < kD / 32; ++j)
                    *reinterpret_cast<float4 *>(scratch + (warp * kOnce + 2 * c + e - first) * kHead + 36 * j + 4 * r) =
                        make_float4(h.o[2 * j][e], h.o[2 * j][e + 2], h.o[2 * j + 1][e], h.o[2 * j + 1][e + 2]);
        // Every thread has two neighbours of a head.
        const int in = tid / (kD / 2), head = first + in, d = 2 * (tid % (kD / 2));
        const int64_t at = first_at + head * kD + d;
        const uint2 gate = head < group && span.n_splits == 1 ? ask_gate(gate_at(p, at)) : make_uint2(0, 0);
        join_consumers(kConsumers);
        mark(a, phase, 2);
        if (head >= group) continue;  // whole warps
        float top[kWarps], sums[kWarps];
#pragma unroll
        for (int w = 0; w < kWarps; w += 2) {
            const float4 f = *reinterpret_cast<const float4 *>(facts + head * kWarps + w);
            top[w] = f.x; sums[w] = f.y; top[w + 1] = f.z; sums[w + 1] = f.w;
        }
        float most = top[0], sum = 0.0f;
#pragma unroll
        for (int w = 1; w < kWarps; ++w) most = fmaxf(most, top[w]);
        float2 o = make_float2(0.0f, 0.0f);
        const float *from = scratch + in * kHead + 36 * (d / 32) + d % 32 / 8 * 8 + d % 8 / 2;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
            const float factor = power2(top[w] - most);
            sum = fmaf(factor, sums[w], sum);
            o.x = fmaf(factor, from[w * kOnce * kHead], o.x);
            o.y = fmaf(factor, from[w * kOnce * kHead + 4], o.y);
        }
        if (span.n_splits == 1) {
            put_outputs(p, span.head * group + head, at, o, sum, most, epoch, gate, gated);
            continue;
        }
        uint8_t *to = ranges + static_cast<int64_t>(span.split) * kRange * 8;
        store_packets2(to + (head * kD + d) * 8, __float_as_uint(o.x), __float_as_uint(o.y), epoch);
        if (d == 0) store_packets2(to + (8 * kD + 2 * head) * 8, __float_as_uint(most), __float_as_uint(sum), epoch);
    }
    mark(a, phase, 6);
    if (span.n_splits == 1) return;
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
        put_outputs(p, span.head * group + head, at, o, sum, most, epoch, gate, gated);
    }
}

// area: attend_bytes of shared memory. base: phases before this launch; at: this phase.
template <int kD>
__device__ __forceinline__ void attend(const Phase &p, const Arguments &a, const RowFacts &facts, uint8_t *area, Taker &taker, uint32_t base, int at) {
    const Attend &t = p.attend;
    const Span span = span_of(t, facts.position);
    if (span.head < 0) return;
    if (facts.is_dead) {
        const int n = t.n_heads / t.n_kv_heads * kD;
        if (span.split == 0)
            for (int j = thread_here(); j < n; j += kConsumers) write_output(p.y, static_cast<int64_t>(span.head) * n + j, 0.0f, true, base + at + 1);
        return;
    }
    join_consumers(kConsumers);  // nobody multiplies any more with what lies here
    place_new<kD>(p, a, span, facts, area, base + p.x.source + 1);
    mark(a, at, 1);
    join_consumers(kConsumers);
    mark(a, at, 3);
    HeadSums<kD> sums;
    attend_range<kD>(p, span, facts.position, area, taker, sums);
    mark(a, at, 4);
    join_warps<kD>(p, a, span, area, sums, base + at + 1, base + p.add.source + 1, at);
    mark(a, at, 5);
}

}  // namespace pk::persist
