// Attention of one new token a row, from the product's raw q, k and v to the heads' outputs: norms, rotation, the new token's
// place in the pages, softmax(q.k) v.
//
// An item is (row, KV head, range of positions); a block takes one at a time. Its warps take 16 positions in turn: K and V go
// straight from memory into mma operands (S^T = K q^T with positions on the M side, O^T = V^T P^T after a transposition in
// registers), each with sums of its own, joined in shared memory. Blocks that share a row leave packets and each join a part of the row's elements.
// Assumes: BF16 pages, equal widths of K and V (64 or 128), at most eight heads a KV head.
#pragma once
#include "../attention.cuh"
#include "phase.h"
#include "stage.cuh"

namespace pk::persist {

constexpr int kStep = 16 * kWarps;  // positions that a block takes at once
__device__ __forceinline__ uint32_t transposed(uint32_t v) {
    uint32_t t;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(t) : "r"(v));
    return t;
}

struct AttendItem {
    int row, head, split, n_splits, first, last, position, index, slot;
    int64_t page;  // where the new token goes
};

// What a lane needs of a head's norm and rotation, asked before the head is there: each load in a row with others costs a
// trip to L2 behind the weights.
template <int kD>
struct Turn {
    float norm[kD / 32], frequency[kD / 64];
    __device__ __forceinline__ void ask(const Attend &t, const float *weights, int lane) {
#pragma unroll
        for (int k = 0; k < kD / 32; ++k) norm[k] = weights != nullptr ? __uint_as_float(load_stream1(weights + lane + 32 * k)) : 1.0f;
#pragma unroll
        for (int k = 0; k < kD / 64; ++k)
            frequency[k] = t.frequency != nullptr && lane + 32 * k < t.rope_width / 2 ? __uint_as_float(load_stream1(t.frequency + lane + 32 * k)) : 0.0f;
    }
};

// A head of the new token: normed (when has_norm) and rotated, in v[kD], by one warp.
template <int kD>
__device__ __forceinline__ void turn_head(const Attend &t, const Turn<kD> &turn, bool has_norm, int position, float *v, int lane) {
    if (has_norm) {
        float s = 0.0f;
#pragma unroll
        for (int k = 0; k < kD / 32; ++k) s += v[lane + 32 * k] * v[lane + 32 * k];
        const float r = rsqrtf(warp_sum(s) * (1.0f / kD) + t.eps);
#pragma unroll
        for (int k = 0; k < kD / 32; ++k) v[lane + 32 * k] *= r * turn.norm[k];
    }
    __syncwarp();
    if (t.frequency != nullptr) {
        const int half = t.rope_width / 2;
#pragma unroll
        for (int k = 0; k < kD / 64; ++k) {
            const int i = lane + 32 * k;
            if (i >= half) continue;
            const int x = t.rope_layout ? 2 * i : i, y = t.rope_layout ? 2 * i + 1 : i + half;
            // Whole turns go away in double: angles reach the length of the context.
            const double angle = static_cast<float>(position) * turn.frequency[k];
            float sine, cosine;
            __sincosf(static_cast<float>(angle - rint(angle * 0.15915494309189535) * 6.283185307179586), &sine, &cosine);
            sine *= t.magnitude;
            cosine *= t.magnitude;
            const float vx = v[x], vy = v[y];
            v[x] = vx * cosine - vy * sine;
            v[y] = vx * sine + vy * cosine;
        }
    }
    __syncwarp();
}

// A head of the raw product (BF16) into v[width].
__device__ __forceinline__ void read_head(const uint8_t *from, int width, uint32_t epoch, float *v, int lane) {
    if (4 * lane < width) {
        float f[4];
        while (!load4<false>(from + 16 * lane, epoch, f)) {
        }
        *reinterpret_cast<float4 *>(v + 4 * lane) = make_float4(f[0], f[1], f[2], f[3]);
    }
    __syncwarp();
}

// q of this KV head's group into shared memory, and the new token's k and v into its page when the range holds it.
template <int kD>
__device__ __forceinline__ void place_new(const Phase &p, const Arguments &a, const AttendItem &item, uint8_t *area, uint32_t epoch) {
    const Attend &t = p.attend;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = t.n_heads / t.n_kv_heads;
    float *v = reinterpret_cast<float *>(area + kScratchAt) + warp * kD;
    const bool is_q = warp < 8, is_v = warp == 9;
    if (warp >= 10 || (!is_q && item.split + 1 != item.n_splits)) return;
    if (!is_q || warp < group) {
        const int head = is_q ? item.head * group + warp : t.n_heads + (is_v ? t.n_kv_heads : 0) + item.head;
        const float *norm = is_q ? t.q_norm : t.k_norm;
        Turn<kD> turn;
        if (!is_v) turn.ask(t, norm, lane);
        read_head(packet_at<false>(p.x.packets, item.row * p.x.stride + static_cast<int64_t>(head) * kD), kD, epoch, v, lane);
        if (!is_v) turn_head<kD>(t, turn, norm != nullptr, item.position, v, lane);
    }
    bf16 *to = is_q ? reinterpret_cast<bf16 *>(area + warp * head_bytes(kD))
                    : reinterpret_cast<bf16 *>(a.kv + item.page * a.page_stride + (is_v ? t.v_offset : t.k_offset)) + (static_cast<int64_t>(item.head) * a.page_tokens + item.position % a.page_tokens) * kD;
    for (int i = lane; i < kD; i += 32) to[i] = __float2bfloat16(!is_q || warp < group ? v[i] : 0.0f);
}

template <int kD>
struct HeadSums {
    float o[kD / 16][4], top[2], sum[2];  // of heads 2c and 2c + 1; o: see row_of
    // The element of a head that o[t][i] belongs to.
    static __device__ int element_of(int t, int i, int r) { return 32 * (t / 2) + 8 * (r / 2) + 4 * (t & 1) + 2 * (i >> 1) + (r & 1); }
};

// One warp over its positions of the range.
template <int kD>
__device__ __forceinline__ void attend_range(const Phase &p, const Arguments &a, const AttendItem &item, const uint8_t *area, HeadSums<kD> &h) {
    const Attend &t = p.attend;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, r = lane >> 2, c = lane & 3;
    const int32_t *pages = a.page_table + static_cast<int64_t>(item.slot) * a.slot_pages;
    const uint8_t *q = area + r * head_bytes(kD) + 16 * c;
    const bool is_capped = t.softcap > 0.0f;
    const float factor = is_capped ? __fdividef(t.scale, t.softcap) : t.scale * kLog2e;
#pragma unroll
    for (int i = 0; i < kD / 16; ++i) h.o[i][0] = h.o[i][1] = h.o[i][2] = h.o[i][3] = 0.0f;
    h.top[0] = h.top[1] = -INFINITY;
    h.sum[0] = h.sum[1] = 0.0f;
#pragma unroll 1
    for (int at = item.first + warp * 16; at < item.last; at += kStep) {
        const uint8_t *base[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int position = min(at + r + 8 * i, item.last - 1), page = position / a.page_tokens;
            base[i] = a.kv + static_cast<int64_t>(__ldg(pages + page)) * a.page_stride + 16 * c +
                      (static_cast<int64_t>(item.head) * a.page_tokens + position - page * a.page_tokens) * (2 * kD);
        }
        uint4 k[2][kD / 32], v[2][kD / 32];
#pragma unroll
        for (int j = 0; j < kD / 32; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i) k[i][j] = __ldcg(reinterpret_cast<const uint4 *>(base[i] + t.k_offset + 64 * j));
        float s[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < kD / 32; ++j) {
            const uint4 x = *reinterpret_cast<const uint4 *>(q + 64 * j);
            mma_bf16(s, k[0][j].x, k[1][j].x, k[0][j].y, k[1][j].y, x.x, x.y);
            mma_bf16(s, k[0][j].z, k[1][j].z, k[0][j].w, k[1][j].w, x.z, x.w);
        }
        asm volatile("" ::: "memory");  // not before: K's registers become V's
#pragma unroll
        for (int j = 0; j < kD / 32; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i) v[i][j] = __ldcg(reinterpret_cast<const uint4 *>(base[i] + t.v_offset + 64 * j));
        // Logits in base 2, capped; without a division here, which would be a call.
#pragma unroll
        for (int e = 0; e < 4; ++e) s[e] = is_capped ? t.softcap * kLog2e * quick_tanh(s[e] * factor) : s[e] * factor;
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (at + r + 8 * i >= item.last) s[2 * i] = s[2 * i + 1] = -INFINITY;
        uint32_t weights[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            float most = fmaxf(s[e], s[e + 2]);
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 4));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 8));
            most = fmaxf(fmaxf(most, __shfl_xor_sync(~0u, most, 16)), h.top[e]);
            const float fade = power2(h.top[e] - most);
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
#pragma unroll
        for (int i = 0; i < kD / 16; ++i) {
            const uint4 &x = v[0][i / 2], &y = v[1][i / 2];
            const bool second = i & 1;
            mma_bf16(h.o[i], transposed(second ? x.z : x.x), transposed(second ? x.w : x.y), transposed(second ? y.z : y.x), transposed(second ? y.w : y.y), weights[0], weights[1]);
        }
    }
#pragma unroll
    for (int e = 0; e < 2; ++e)
#pragma unroll
        for (int o = 4; o < 32; o <<= 1) h.sum[e] += __shfl_xor_sync(~0u, h.sum[e], o);
}

// A head's element: what all positions gave, divided by the sum of weights, the head's sink among them. All lanes of a warp
// call it, with neighbours side by side.
__device__ __forceinline__ void put_output(const Phase &p, const AttendItem &item, int head, int d, int width, float o, float sum, float top, uint32_t epoch) {
    const Attend &t = p.attend;
    const int at = item.head * (t.n_heads / t.n_kv_heads) + head;
    if (t.sinks != nullptr) {
        const float sink = __ldg(t.sinks + at) * kLog2e, joint = fmaxf(top, sink);
        o *= power2(top - joint);
        sum = sum * power2(top - joint) + power2(sink - joint);
    }
    write_output(p.y, item.row * p.y.stride + static_cast<int64_t>(at) * width + d, __fdividef(o, sum), true, epoch);
}

// Joins the warps; then writes the heads, or leaves them for the last block of the row and joins those.
template <int kD>
__device__ __forceinline__ void join_warps(const Phase &p, const Arguments &a, const AttendItem &item, uint8_t *area, const HeadSums<kD> &h, uint32_t epoch) {
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, r = lane >> 2, c = lane & 3, group = p.attend.n_heads / p.attend.n_kv_heads;
    float *tops = reinterpret_cast<float *>(area + kTopsAt), *sums = tops + kWarps * 8, *scratch = reinterpret_cast<float *>(area + kScratchAt);
    if (r == 0) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            tops[warp * 8 + 2 * c + e] = h.top[e];
            sums[warp * 8 + 2 * c + e] = h.sum[e];
        }
    }
    join_consumers(kConsumers);
    auto top_of = [&](int head) {
        float most = -INFINITY;
#pragma unroll 4
        for (int w = 0; w < kWarps; ++w) most = fmaxf(most, tops[w * 8 + head]);
        return most;
    };
    float factor[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) factor[e] = power2(h.top[e] - top_of(2 * c + e));
    // Packets of this range: sums of every element of the group's heads, then the heads' largest logits and sums of weights.
    constexpr int kRange = 8 * kD + 16;
    uint8_t *ranges = a.partial + static_cast<int64_t>(item.index - item.split) * kRange * 8;
#pragma unroll 1
    for (int first = 0; first < group; first += 4) {
        if (2 * c >= first && 2 * c < first + 4) {
#pragma unroll
            for (int i = 0; i < kD / 16; ++i)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    scratch[(warp * 4 + 2 * c + (e & 1) - first) * kD + HeadSums<kD>::element_of(i, e, r)] = h.o[i][e] * factor[e & 1];
        }
        join_consumers(kConsumers);
#pragma unroll 1
        for (int j = tid; j < 4 * kD; j += kConsumers) {
            const int head = first + j / kD, d = j % kD;
            if (head >= group) continue;  // whole warps
            float o = 0.0f, sum = 0.0f;
            const float top = top_of(head);
#pragma unroll 4
            for (int w = 0; w < kWarps; ++w) {
                o += scratch[w * 4 * kD + j];
                sum += sums[w * 8 + head] * power2(tops[w * 8 + head] - top);
            }
            if (item.n_splits == 1) {
                put_output(p, item, head, d, kD, o, sum, top, epoch);
            } else {
                uint8_t *to = ranges + static_cast<int64_t>(item.split) * kRange * 8;
                store_packet(to + (head * kD + d) * 8, __float_as_uint(o), epoch);
                if (d == 0) {
                    store_packet(to + (8 * kD + 2 * head) * 8, __float_as_uint(top), epoch);
                    store_packet(to + (8 * kD + 2 * head + 1) * 8, __float_as_uint(sum), epoch);
                }
            }
        }
        join_consumers(kConsumers);
    }
    if (item.n_splits == 1) return;
    // Every block of the row joins a part of the elements, warps at a time.
    const int n_warps = group * kD / 32;
    auto wait = [&](const uint8_t *at) {
        uint2 w;
        do w = load_packet(at);
        while (w.y != epoch);
        return __uint_as_float(w.x);
    };
    for (int j = item.split + warp * item.n_splits; j < n_warps; j += kWarps * item.n_splits) {
        const int head = j * 32 / kD, d = j * 32 % kD + lane;
        float most = -INFINITY, o = 0.0f, sum = 0.0f;
#pragma unroll 1
        for (int k = 0; k < item.n_splits; ++k) {
            const uint8_t *from = ranges + static_cast<int64_t>(k) * kRange * 8;
            const float value = wait(from + (head * kD + d) * 8), top = wait(from + (8 * kD + 2 * head) * 8), part = wait(from + (8 * kD + 2 * head + 1) * 8);
            const float next = fmaxf(most, top), old = power2(most - next), now = power2(top - next);
            o = o * old + value * now;
            sum = sum * old + part * now;
            most = next;
        }
        put_output(p, item, head, d, kD, o, sum, most, epoch);
    }
}

// item and area (kAttendBytes): shared memory. base: phases before this launch; at: this phase.
template <int kD>
__device__ __noinline__ void attend(const Phase &p, const Arguments &a, const RowFacts *rows, AttendItem &item, uint8_t *area, int n_rows, uint32_t base, int at) {
    const Attend &t = p.attend;
    const int group = t.n_heads / t.n_kv_heads, most = max(1, static_cast<int>(gridDim.x) / max(1, n_rows * t.n_kv_heads)), n_items = n_rows * t.n_kv_heads * most;
#pragma unroll 1
    for (int index = blockIdx.x; index < n_items; index += gridDim.x) {
        const int split = index % most, head = index / most % t.n_kv_heads, row = index / most / t.n_kv_heads;
        const RowFacts facts = rows[row];
        if (facts.is_dead) {
            if (split == 0)
                for (int j = threadIdx.x; j < group * kD; j += kConsumers) write_output(p.y, row * p.y.stride + static_cast<int64_t>(head) * group * kD + j, 0.0f, true, base + at + 1);
            continue;
        }
        const int begin = t.window > 0 ? max(0, facts.position - t.window + 1) : 0, n = facts.position + 1 - begin;
        const int wanted = min(most, (n + kStep - 1) / kStep), each = ((n + wanted - 1) / wanted + 15) / 16 * 16, n_splits = (n + each - 1) / each;
        if (split >= n_splits) continue;
        const int first = begin + split * each;
        // In shared memory: registers are for keys and values.
        if (threadIdx.x == 0) item = {row, head, split, n_splits, first, min(begin + n, first + each), facts.position, index, facts.slot, facts.page};
        join_consumers(kConsumers);
        place_new<kD>(p, a, item, area, base + p.x.source + 1);
        join_consumers(kConsumers);
        HeadSums<kD> sums;
        attend_range<kD>(p, a, item, area, sums);
        join_warps<kD>(p, a, item, area, sums, base + at + 1);
        join_consumers(kConsumers);
    }
}

}  // namespace pk::persist
