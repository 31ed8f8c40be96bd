// What attention of one new token a row begins with (attend.cuh): which positions a block takes, and the raw q, k and v on their way from the product,
// normed, turned, and placed in shared memory and in the new token's page.
#pragma once
#include "kept.cuh"
#include "phase.h"
#include "stage.cuh"

namespace pk::persist {

// What a block does: positions [first, last) of a KV head, in groups of 16 that begin at multiples of 16. None: head < 0.
struct Span {
    int head, split, n_splits, first, last;
    bool is_paired;
};
__device__ __forceinline__ Span span_of(const Attend &t, int position, int paired) {
    const int most = min(32, max(1, static_cast<int>(gridDim.x) / t.n_kv_heads)), head = blockIdx.x / most, split = blockIdx.x - head * most;
    const int begin = t.window > 0 ? max(0, position - t.window + 1) & ~15 : 0, groups = (position - begin + 15) / 16;
    const bool is_paired = groups > kWarps && groups <= paired && most % 2 == 0 && t.head_width <= kPairedWidth;
    const int wanted = is_paired ? 2 : min(most, (groups + kWarps - 1) / kWarps), each = max(1, (groups + wanted - 1) / wanted), n_splits = max(1, (groups + each - 1) / each);
    if (head >= t.n_kv_heads || split >= n_splits) return {-1, 0, 0, 0, 0, false};
    const int first = begin + split * each * 16;
    return {head, split, n_splits, first, min(position, first + each * 16), is_paired};
}

// Four neighbouring elements of a head a lane, of wider heads four more that are not turned. What a lane needs of the norm and the rotation is asked
// and worked out before the head is there.
template <int kD>
struct Turn {
    static constexpr int kParts = kD > 128 ? kD / 128 : 1;
    float norm[kParts][4], sine[4], cosine[4];
    int partner;  // lane that holds the other halves of pairs
    // What comes from memory; work_out: what becomes of it.
    __device__ __forceinline__ void ask(const Attend &t, const float *weights, int lane) {
        const int e = 4 * lane, half = t.rope_width / 2;
        const bool is_head = e < kD, is_turned = t.frequency != nullptr && e < t.rope_width;
#pragma unroll
        for (int k = 0; k < kParts; ++k) {
            const float4 n = weights != nullptr && is_head ? __ldg(reinterpret_cast<const float4 *>(weights) + 32 * k + lane) : make_float4(1.0f, 1.0f, 1.0f, 1.0f);
            norm[k][0] = n.x; norm[k][1] = n.y; norm[k][2] = n.z; norm[k][3] = n.w;
        }
        partner = !is_turned || t.rope_layout ? lane : e < half ? lane + half / 4 : lane - half / 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) cosine[i] = is_turned ? __ldg(t.frequency + (t.rope_layout ? (e + i) / 2 : e < half ? e + i : e + i - half)) : 0.0f;
    }
    __device__ __forceinline__ void work_out(const Attend &t, int position, int lane) {
        const int e = 4 * lane, half = t.rope_width / 2;
        const bool is_turned = t.frequency != nullptr && e < t.rope_width;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            // Whole turns go away in double: angles reach the length of the context.
            const double angle = static_cast<float>(position) * cosine[i];
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

// A head of the raw q, k and v of this KV head on its way to a warp: q's heads, then k, then v.
template <int kD, Pages kPages>
struct Arrival {
    static constexpr bool kIsF32 = kPages == kInF16;
    static constexpr int kParts = Turn<kD>::kParts, kLoads = kIsF32 ? 2 : 1;  // a packet is one F32 or two BF16
    Turn<kD> turn;
    const uint8_t *from;
    const float *norm;
    float gain;
    uint4 raw[kParts][kLoads];
    // The head, and what its turn takes, of which the angles are still to be worked out.
    __device__ __forceinline__ void prepare(const Phase &p, const Span &span, int task, int lane) {
        const Attend &t = p.attend;
        const int group = t.n_heads / t.n_kv_heads;
        const bool is_q = task < group, is_v = task > group;
        const int head = is_q ? span.head * group + task : t.n_heads + (is_v ? t.n_kv_heads : 0) + span.head;
        norm = is_v ? nullptr : is_q ? t.q_norm : t.k_norm;
        from = packet_at<kIsF32>(p.x.packets, static_cast<int64_t>(head) * kD) + 16 * kLoads * (4 * lane < kD ? lane : 0);
        if constexpr (kPages == kInFp8) gain = t.gains != nullptr ? __ldg(t.gains + head) : 1.0f;
        turn.ask(t, norm, lane);
        ask();
    }
    __device__ __forceinline__ void ask() {
#pragma unroll
        for (int k = 0; k < kParts; ++k)
#pragma unroll
            for (int i = 0; i < kLoads; ++i) raw[k][i] = load_packets2(from + 512 * kLoads * k + 16 * i);
    }
    __device__ __forceinline__ bool is_there(uint32_t epoch) const {
        bool yes = true;
#pragma unroll
        for (int k = 0; k < kParts; ++k)
#pragma unroll
            for (int i = 0; i < kLoads; ++i) yes &= raw[k][i].y == epoch && raw[k][i].w == epoch;
        return yes;
    }
    // The i-th of this lane's four elements of a part.
    __device__ __forceinline__ float number(int k, int i) const {
        const uint4 &r = raw[k][kIsF32 ? i / 2 : 0];
        if constexpr (kIsF32) return __uint_as_float(i % 2 ? r.z : r.x);
        const uint32_t pair = i / 2 ? r.z : r.x;
        return i % 2 ? high_f32(pair) : low_f32(pair);
    }
};

// Of a position's K or V.
template <int kD, Pages kPages>
constexpr int kRowBytes = kPages == kInFp8 ? kD : 2 * kD;

// q of this KV head's group into shared memory, and the new token's k and v into shared memory and its page when the range holds it. arrival: of
// this warp's first head.
template <int kD, Pages kPages>
__device__ __forceinline__ void place_new(const Phase &p, const Arguments &a, const Span &span, const RowFacts &facts, uint8_t *area, uint32_t epoch, Arrival<kD, kPages> &arrival) {
    const Attend &t = p.attend;
    const int lane = thread_here() & 31, warp = thread_here() >> 5, group = t.n_heads / t.n_kv_heads, n_tasks = span.split + 1 == span.n_splits ? group + 2 : group;
    const bool is_head = 4 * lane < kD;
    constexpr int kParts = Turn<kD>::kParts;
    if (is_head && group + warp < 8)
#pragma unroll
        for (int k = 0; k < kParts; ++k) *reinterpret_cast<uint2 *>(area + (group + warp) * head_bytes(kD) + 256 * k + 8 * lane) = make_uint2(0, 0);
#pragma unroll 1
    for (int task = warp; task < n_tasks; task += kWarps) {
        const bool is_q = task < group, is_v = task > group;
        if (task != warp) {
            arrival.prepare(p, span, task, lane);
            arrival.turn.work_out(t, facts.position, lane);
        }
        while (!arrival.is_there(epoch)) arrival.ask();
        __syncwarp();
        float v[kParts][4];
#pragma unroll
        for (int k = 0; k < kParts; ++k)
#pragma unroll
            for (int i = 0; i < 4; ++i) v[k][i] = is_head ? arrival.number(k, i) : 0.0f;
        if (!is_v) arrival.turn.turn(t, arrival.norm != nullptr, v);
        if (!is_head) continue;
#pragma unroll
        for (int k = 0; k < kParts; ++k) {
            uint32_t code = 0;
            if constexpr (kPages == kInFp8) {
#pragma unroll
                for (int i = 0; i < 4; ++i) v[k][i] *= arrival.gain;
                code = narrowed(v[k]);
            }
            uint2 packed = make_uint2(Kept<kPages>::keep(v[k][0], v[k][1]), Kept<kPages>::keep(v[k][2], v[k][3]));
            if (kPages == kInFp8 && !is_q) packed = make_uint2(widened(code, 0), widened(code, 1));
            *reinterpret_cast<uint2 *>(area + (is_q ? task * head_bytes(kD) : new_at(kD) + is_v * 2 * kD) + 256 * k + 8 * lane) = packed;
            if (!is_q) {
                const int64_t at = (static_cast<int64_t>(span.head) * a.page_tokens + facts.position % a.page_tokens) * kRowBytes<kD, kPages>;
                uint8_t *to = a.kv + static_cast<int64_t>(facts.page) * a.page_stride + (is_v ? t.v_offset : t.k_offset) + at;
                if constexpr (kPages == kInFp8) *reinterpret_cast<uint32_t *>(to + 128 * k + 4 * lane) = code;
                else *reinterpret_cast<uint2 *>(to + 256 * k + 8 * lane) = packed;
            }
        }
    }
}

}  // namespace pk::persist
