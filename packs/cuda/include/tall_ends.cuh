// How a tall matmul ends (gemm_tall.cuh): what a warpgroup has summed of 64 rows of x goes to y in pieces of 32 columns, gated tiles whole.
#pragma once
#include "gemm_boxes.cuh"
#include "gemm_store.cuh"

namespace pk {

constexpr int kTallGroups = 2, kTallConsumers = 128 * kTallGroups, kTallStages = 4, kPiece = 32, kPieceFloats = 64 * kPiece, kFactorWarps = 3;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
__device__ __forceinline__ void consumers_meet() { asm volatile("bar.sync 1, %0;" ::"n"(kTallConsumers) : "memory"); }
__device__ __forceinline__ void barrier_more(uint64_t *b, int bytes) { asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(bytes) : "memory"); }
// The same number, which the compiler takes for another.
__device__ __forceinline__ int fresh(int v) {
    asm volatile("" : "+r"(v));
    return v;
}
__device__ __forceinline__ void prefetch_map(const CUtensorMap *map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
__device__ __forceinline__ void store_if(bool does, float *to, float a, float b, float c, float d) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n@p st.v4.f32 [%1], {%2, %3, %4, %5};\n}\n" ::"r"(static_cast<int>(does)), "l"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
// From L2 or from shared memory; else zeros.
__device__ __forceinline__ float4 load_if(bool does, const float *from) {
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %4, 0;\n@p ld.relaxed.gpu.v4.f32 {%0, %1, %2, %3}, [%5];\n}\n" : "+f"(v.x), "+f"(v.y), "+f"(v.z), "+f"(v.w) : "r"(static_cast<int>(does)), "l"(from) : "memory");
    return v;
}
// A counter of so many blocks that come and leave: the last one's leaving wraps it to zero. What a block has written before its threads met is there for whoever sees it counted.
__device__ __forceinline__ void count_in(int32_t *counter, int n) { asm volatile("red.release.gpu.global.inc.u32 [%0], %1;" ::"l"(counter), "r"(2 * n - 1) : "memory"); }
__device__ __forceinline__ void await_all(int32_t *counter, int n) {
    int seen;
    do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    while (seen < n);
}
__device__ __forceinline__ void count_out(int32_t *counter, int n) { asm volatile("red.relaxed.gpu.global.inc.u32 [%0], %1;" ::"l"(counter), "r"(2 * n - 1) : "memory"); }

// Two sets of 64 sums of a thread, to where the same thread of another block finds them, and from there.
__device__ __forceinline__ void lay_sums(float *to, const float (&acc)[2][64]) {
#pragma unroll
    for (int i = 0; i < 32; ++i) __stcg(reinterpret_cast<float4 *>(to + i * 512), make_float4(acc[i / 16][i % 16 * 4], acc[i / 16][i % 16 * 4 + 1], acc[i / 16][i % 16 * 4 + 2], acc[i / 16][i % 16 * 4 + 3]));
}
__device__ __forceinline__ void add_laid(const float *from, float (&acc)[2][64]) {
    constexpr int kFlight = 8;  // loads under way
#pragma unroll
    for (int first = 0; first < 32; first += kFlight) {
        float4 v[kFlight];
#pragma unroll
        for (int i = 0; i < kFlight; ++i) v[i] = load_if(true, from + (first + i) * 512);
#pragma unroll
        for (int i = 0; i < kFlight; ++i) {
            float *sum = acc[(first + i) / 16] + (first + i) % 16 * 4;
            sum[0] += v[i].x; sum[1] += v[i].y; sum[2] += v[i].z; sum[3] += v[i].w;
        }
    }
}

// Column n of all weights side by side: whose it is. first_tile counts columns here.
__device__ __forceinline__ int weight_of(const GemmArguments &a, int n) { return a.n_w > 2 && n >= a.w[2].first_tile ? 2 : a.n_w > 1 && n >= a.w[1].first_tile ? 1 : 0; }

// Factors of all rows by what a norm left: 1 / rms, squares of 64 columns each. One of three warps: 32 rows at a time, a quarter of the squares a lane.
__device__ __forceinline__ void tall_factors(const HalfNorm &norm, int warp, int lane, float (&factors)[kClusterRows]) {
#pragma unroll 1
    for (int row = 32 * warp + 4 * (lane & 7); row - 4 * (lane & 7) < norm.stride; row += 32 * kFactorWarps) {
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (row < norm.stride) {
#pragma unroll 2
            for (int p = lane >> 3; p < norm.n_cols / 64; p += 4) {
                const float4 v = __ldcg(reinterpret_cast<const float4 *>(norm.row_squares + p * norm.stride + row));
                sum.x += v.x; sum.y += v.y; sum.z += v.z; sum.w += v.w;
            }
        }
        auto all = [](float v) {
            v += __shfl_xor_sync(~0u, v, 8);
            return v + __shfl_xor_sync(~0u, v, 16);
        };
        sum = make_float4(all(sum.x), all(sum.y), all(sum.z), all(sum.w));
        auto factor = [&](float v) { return rsqrtf(v / norm.n_cols + norm.eps); };
        if (lane < 8 && row < norm.stride) *reinterpret_cast<float4 *>(factors + row) = make_float4(factor(sum.x), factor(sum.y), factor(sum.z), factor(sum.w));
    }
    __syncwarp();
}

// Stores 32 columns from column n on: rows `row` and row + 8 below `end`, columns 8j + 2c and the next.
__device__ __forceinline__ void store_piece(const GemmArguments &a, int n, int row, int c, int end, float factor, float factor8, const float (&sums)[16]) {
    const GemmWeight &w = a.w[weight_of(a, n)];
    n -= w.first_tile;
    if (n >= w.rows) return;
    const float f[2] = {w.scale * a.scale * factor, w.scale * a.scale * factor8};
    float v[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = sums[i] * f[i >> 1 & 1];
    if (w.bias != nullptr) {
#pragma unroll
        for (int i = 0; i < 16; ++i) v[i] += __ldg(w.bias + n + 8 * (i / 4) + 2 * c + (i & 1)) * a.scale;
    }
    const bool in[2] = {row < end, row + 8 < end};
    n += w.first_column;
    if (a.y_format == PK_BF16) {
        bf16 *y = static_cast<bf16 *>(a.y) + row * a.y_stride + n + 8 * c;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const uint4 p = gather_columns(pack_bf16(v[2 * h], v[2 * h + 1]), pack_bf16(v[4 + 2 * h], v[5 + 2 * h]), pack_bf16(v[8 + 2 * h], v[9 + 2 * h]), pack_bf16(v[12 + 2 * h], v[13 + 2 * h]), c);
            if (in[h]) *reinterpret_cast<uint4 *>(y + 8 * h * a.y_stride) = p;
        }
        return;
    }
    // Lanes 2i and 2i + 1 share columns of two neighbouring groups of eight, so that each has four in a row.
    const bool odd = c & 1, in_memory = a.add == a.y && a.add_stride == a.y_stride;
    n += 8 * odd + 2 * (c & 2);
    float *y = static_cast<float *>(a.y) + row * a.y_stride + n;
    const float *add = static_cast<const float *>(a.add) + row * a.add_stride + n;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int i = 8 * j + 2 * h;
            const float p = __shfl_xor_sync(~0u, odd ? v[i] : v[i + 4], 1), q = __shfl_xor_sync(~0u, odd ? v[i + 1] : v[i + 5], 1);
            float4 sum = odd ? make_float4(p, q, v[i + 4], v[i + 5]) : make_float4(v[i], v[i + 1], p, q);
            float *at = y + 8 * h * a.y_stride + 16 * j;
            if (!in[h]) continue;
            if (in_memory) {
                add_in_memory(at, sum);
                continue;
            }
            if (a.add != nullptr) {
                const float4 old = __ldcg(reinterpret_cast<const float4 *>(add + 8 * h * a.add_stride + 16 * j));
                sum = make_float4(sum.x + old.x, sum.y + old.y, sum.z + old.z, sum.w + old.w);
            }
            __stcg(reinterpret_cast<float4 *>(at), sum);
        }
}

// As store_front, of 64 columns: half of 128 whose rows go out narrowed, where the other warpgroup has the other half. `largest` is of the row, the second's kClusterRows / 2 behind the first's.
template <class Sums>
__device__ __forceinline__ void store_front_narrowed(const GemmArguments &a, int n, int row, int c, int end, float *largest, int wg, const Sums &acc) {
    const float f = a.w[0].scale * a.scale;
    const bool in[2] = {row < end, row + 8 < end};
    uint32_t pairs[2][8];
    float most[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int at = row + 8 * h, column = n + 2 * c;
        const float *add = static_cast<const float *>(a.add) + at * a.add_stride + column;
        float *y = static_cast<float *>(a.y) + at * a.y_stride + column;
        float2 old[8], gain[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            old[j] = in[h] ? __ldcg(reinterpret_cast<const float2 *>(add + 8 * j)) : make_float2(0.0f, 0.0f);
            gain[j] = __ldg(reinterpret_cast<const float2 *>(a.norm.w + column + 8 * j));
        }
        float square = 0.0f;
        most[h] = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float low = acc[4 * j + 2 * h] * f + old[j].x, high = acc[4 * j + 2 * h + 1] * f + old[j].y;
            square += low * low + high * high;
            pairs[h][j] = pack_bf16(low * gain[j].x, high * gain[j].y);
            most[h] = fmaxf(most[h], fmaxf(fabsf(low_f32(pairs[h][j])), fabsf(high_f32(pairs[h][j]))));
            if (in[h]) __stcg(reinterpret_cast<float2 *>(y + 8 * j), make_float2(low, high));
        }
#pragma unroll
        for (int far = 1; far <= 2; far *= 2) {
            square += __shfl_xor_sync(~0u, square, far);
            most[h] = fmaxf(most[h], __shfl_xor_sync(~0u, most[h], far));
        }
        if (c == 0) largest[wg * (kClusterRows / 2) + 8 * h] = most[h];
        if (c == 0 && in[h]) a.norm.squares[(n >> 6) * a.norm.stride + at] = square;
    }
    consumers_meet();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float all = fmaxf(most[h], largest[(wg ^ 1) * (kClusterRows / 2) + 8 * h]), scale = all > 0.0f ? all / 448.0f : 1.0f, inverse = 1.0f / scale;
        auto codes = [&](int j) { return static_cast<uint32_t>(__nv_cvt_float2_to_fp8x2(make_float2(low_f32(pairs[h][j]) * inverse, high_f32(pairs[h][j]) * inverse), __NV_SATFINITE, __NV_E4M3)); };
        auto word = [&](int i) { return codes(2 * i) | codes(2 * i + 1) << 16; };
        // Of two groups of eight columns, what four lanes have.
        const uint4 w = gather_columns(word(0), word(1), word(2), word(3), c);
        const uint4 v = make_uint4(__byte_perm(w.x, w.y, 0x5410), __byte_perm(w.z, w.w, 0x5410), __byte_perm(w.x, w.y, 0x7632), __byte_perm(w.z, w.w, 0x7632));
        if (in[h]) *reinterpret_cast<uint4 *>(a.narrowed.x + static_cast<int64_t>(row + 8 * h) * a.narrowed.row_bytes + n + 16 * c) = v;
        if (wg == 0 && c == 0 && in[h]) a.narrowed.scales[(n >> 7) * a.narrowed.scale_stride + row + 8 * h] = scale;
    }
}

// As store_piece, of a whole gated tile: half of the columns from column n of gate on, half from there of up. 128 of y may be wanted narrowed.
template <int kWidth, int kAct, class Sums>
__device__ __forceinline__ void store_gated(const GemmArguments &a, int n, int row, int c, int end, float factor, float factor8, const Sums &acc) {
    const float f[2] = {a.w[0].scale * factor, a.w[0].scale * factor8}, g[2] = {a.w[1].scale * a.scale * factor, a.w[1].scale * a.scale * factor8};
    const bool in[2] = {row < end, row + 8 < end};
    auto pair = [&](int i, int h) {
        float v[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const float gate = acc[4 * i + 2 * h + e] * f[h];
            v[e] = (kAct == PK_ACT_SILU ? __fdividef(gate, 1.0f + __expf(-gate)) : activate(gate, kAct)) * acc[4 * (i + kWidth / 16) + 2 * h + e] * g[h];
        }
        return pack_bf16(v[0], v[1]);
    };
    bf16 *y = static_cast<bf16 *>(a.y) + row * a.y_stride + a.w[0].first_column + n + 8 * c;
    if constexpr (kWidth == 256) {
        const bool is_narrowed = a.narrowed.x != nullptr, is_plain = !is_narrowed || !a.narrowed.is_all;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            uint32_t pairs[16];
#pragma unroll
            for (int j = 0; j < 16; ++j) pairs[j] = pair(j, h);
            if (is_narrowed) store_narrowed(a.narrowed, n, row + 8 * h, c, in[h], pairs);
            if (!is_plain) continue;
#pragma unroll
            for (int j = 0; j < 16; j += 4) {
                const uint4 p = gather_columns(pairs[j], pairs[j + 1], pairs[j + 2], pairs[j + 3], c);
                if (in[h]) *reinterpret_cast<uint4 *>(y + 8 * h * a.y_stride + 8 * j) = p;
            }
        }
    } else {
#pragma unroll
        for (int j = 0; j < kWidth / 16; j += 4) {
            if (n + 8 * j >= a.w[0].rows) return;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const uint4 p = gather_columns(pair(j, h), pair(j + 1, h), pair(j + 2, h), pair(j + 3, h), c);
                if (in[h]) *reinterpret_cast<uint4 *>(y + 8 * h * a.y_stride + 8 * j) = p;
            }
        }
    }
}
#endif

}  // namespace pk
