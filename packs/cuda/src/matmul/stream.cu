// Streaming matmul: y[rows, N] = x[rows, K] W^T for 1 to 64 rows, at the speed of reading W.
//
// Weights stand on the M side of mma.sync m16n8k16, eight rows of x on the N side; a warp multiplies two tiles of 16 rows
// of W straight from registers, the warps of a block share x in shared memory and split K; blocks split K further
// (n_slices) and the last one to arrive adds the parts in slice order. Blocks are persistent over row tiles of one slice.
// Formats: one per translation unit (PK_STREAM_FORMAT). x, y, add: F32 or BF16. With an activation the two tiles of a
// warp are the gate and the up matrix. Shared memory: x slice, its group sums, partial sums of the warps.
// Rows of x that are no multiple of 16 bytes are read one element at a time. Does not handle: more than 64 rows.
#include "../../include/stream.cuh"

#include "../../include/device.cuh"
#include "../../include/format/rows.cuh"
#include "../../include/format/unit.cuh"

namespace pk {
namespace {

template <int kFormat, bool kBlock> struct Weight;
template <int kFormat> struct Weight<kFormat, true> {
    using U = Unit<kFormat>;
    using Registers = UnitRegisters<U>;
    static constexpr int kU = U::kU, kGroup = U::kGroup, kBias = U::kBias;
    static constexpr bool kScaled = true, kHasMin = U::kHasMin;
    __device__ static void load(Registers &r, const StreamWeight &w, int row0, int unit, int n_units, int lane) {
        load_unit<U>(r, w.data + (static_cast<int64_t>(row0 >> 4) * n_units + unit) * U::kBytes, lane);
    }
    __device__ static void codes(const Registers &r, int b, int row, uint32_t (&out)[4]) { unit_codes<U>(r, b, row, out); }
    __device__ static void scale(const Registers &r, int g, int row, float &s, float &m) { unit_scale<U>(r, g, row, s, m); }
};
template <int kFormat> struct Weight<kFormat, false> {
    using Registers = RowsRegisters;
    static constexpr int kU = Rows<kFormat>::kU, kGroup = 32, kBias = 0;
    static constexpr bool kScaled = false, kHasMin = false;
    __device__ static void load(Registers &r, const StreamWeight &w, int row0, int unit, int, int lane) {
        load_rows<kFormat>(r, w.data + row0 * w.row_bytes, w.row_bytes, unit, lane);
    }
    __device__ static void codes(const Registers &r, int b, int row, uint32_t (&out)[4]) { rows_codes<kFormat, 0>(r, b, row, out); }
    __device__ static void scale(const Registers &, int, int, float &s, float &m) { s = 1.0f; m = 0.0f; }
};

// Where the run of four elements at k goes among the staged elements, so that a lane's eight values are neighbours.
template <int kFormat>
__device__ __forceinline__ int staged_position(int k) {
    if constexpr (is_block_format(kFormat)) {
        int in = k & 31;
        return (k & ~31) + 8 * ((in & 15) >> 2) + 4 * (in >> 4);
    } else if constexpr (Rows<kFormat>::kIsFp8) {
        int in = k & 63;
        return (k & ~63) + 32 * ((in >> 3) & 1) + 8 * (in >> 4) + (in & 7);
    } else {
        return k;
    }
}

template <int kFormat>
__device__ __forceinline__ void stage_x(const StreamArguments &a, uint8_t *xs, int k0, int k_count, int n_rows) {
    const int per_row = k_count / 8, n_pieces = per_row * a.staged_rows;
    // Loads that a thread has under way: beside the first weights, which some formats hold in many registers.
    constexpr int kFlight = sizeof(typename Weight<kFormat, is_block_format(kFormat)>::Registers) > 120 ? 3 : 6;
    for (int first = threadIdx.x; first < n_pieces; first += kFlight * kStreamThreads) {
        float v[kFlight][8];
#pragma unroll
        for (int j = 0; j < kFlight; ++j) {
            const int i = first + j * kStreamThreads, n = i / per_row, k = (i - n * per_row) * 8;
#pragma unroll
            for (int e = 0; e < 8; ++e) v[j][e] = 0.0f;
            if (i < n_pieces && n < n_rows && k0 + k < a.k) {
                if (a.is_wide) {
                    load8(a.x, n * a.x_stride + k0 + k, a.x_format, v[j]);
                } else {
                    for (int e = 0; e < 8; ++e) v[j][e] = k0 + k + e < a.k ? load_as_f32(a.x, n * a.x_stride + k0 + k + e, a.x_format) : 0.0f;
                }
            }
        }
#pragma unroll
        for (int j = 0; j < kFlight; ++j) {
            const int i = first + j * kStreamThreads, n = i / per_row, k = (i - n * per_row) * 8;
            if (i >= n_pieces) continue;
            const float(&f)[8] = v[j];
            uint2 low = make_uint2(pack_bf16(f[0], f[1]), pack_bf16(f[2], f[3])), high = make_uint2(pack_bf16(f[4], f[5]), pack_bf16(f[6], f[7]));
            if constexpr (!is_block_format(kFormat) && Rows<kFormat>::kIsFp8) {
                low = make_uint2(pack_bf16(f[0], f[2]), pack_bf16(f[1], f[3]));
                high = make_uint2(pack_bf16(f[4], f[6]), pack_bf16(f[5], f[7]));
            }
            uint8_t *row = xs + n * a.x_row_bytes;
            *reinterpret_cast<uint2 *>(row + 2 * staged_position<kFormat>(k)) = low;
            *reinterpret_cast<uint2 *>(row + 2 * staged_position<kFormat>(k + 4)) = high;
        }
    }
}

// sums[g][n] = -kBias (or -1) times the sum of group g of row n.
template <class W>
__device__ __forceinline__ void stage_sums(const StreamArguments &a, const uint8_t *xs, float *sums, int k_count) {
    constexpr int kParts = 32 / W::kGroup;
    const int n_blocks = k_count / 32;
    const float factor = W::kBias ? -static_cast<float>(W::kBias) : -1.0f;
    for (int i = threadIdx.x; i < n_blocks * 8; i += kStreamThreads) {
        int b = i >> 3, n = i & 7;
        float s0 = 0.0f, s1 = 0.0f;
        if (n < a.staged_rows) {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                uint4 v = *reinterpret_cast<const uint4 *>(xs + n * a.x_row_bytes + b * 64 + c * 16);
                s0 += low_f32(v.x) + high_f32(v.x) + low_f32(v.y) + high_f32(v.y);
                s1 += low_f32(v.z) + high_f32(v.z) + low_f32(v.w) + high_f32(v.w);
            }
        }
        if constexpr (kParts == 2) {
            sums[(2 * b) * 8 + n] = factor * s0;
            sums[(2 * b + 1) * 8 + n] = factor * s1;
        } else {
            sums[b * 8 + n] = factor * (s0 + s1);
        }
    }
}

// Multiplies one unit into the accumulators of one tile of 16 rows.
template <class W, int kFormat, int kNT>
__device__ __forceinline__ void multiply(const typename W::Registers &r, float (&acc)[kNT][4], const uint8_t *x_lane, int x_group_bytes, const float *sums_lane, float block_scale) {
    float tmp[kNT][4];
    if constexpr (Rows<kFormat>::kIsFp8) {
#pragma unroll
        for (int n = 0; n < kNT; ++n) tmp[n][0] = tmp[n][1] = tmp[n][2] = tmp[n][3] = 0.0f;
    }
#pragma unroll
    for (int b = 0; b < W::kU / 32; ++b) {
        uint32_t lo[4], hi[4];
        if constexpr (kNT * W::kU > 64) __syncwarp();  // stops the scheduler from decoding all blocks at once, which spills
        W::codes(r, b, 0, lo);
        W::codes(r, b, 1, hi);
        if constexpr (W::kScaled && kNT == 1) {
            uint4 x = *reinterpret_cast<const uint4 *>(x_lane + b * 64);
            constexpr int kParts = 32 / W::kGroup;
#pragma unroll
            for (int p = 0; p < kParts; ++p) {
                float s0, m0, s1, m1;
                W::scale(r, b * kParts + p, 0, s0, m0);
                W::scale(r, b * kParts + p, 1, s1, m1);
                float t[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                float2 bias = make_float2(0.0f, 0.0f);
                if constexpr (W::kBias != 0) {
                    bias = *reinterpret_cast<const float2 *>(sums_lane + (b * kParts + p) * 8);
                    t[0] = bias.x; t[1] = bias.y; t[2] = bias.x; t[3] = bias.y;
                }
                if (kParts == 1 || p == 0) mma_bf16(t, lo[0], hi[0], lo[1], hi[1], x.x, x.y);
                if (kParts == 1 || p == 1) mma_bf16(t, lo[2], hi[2], lo[3], hi[3], x.z, x.w);
                acc[0][0] = fmaf(s0, t[0], acc[0][0]); acc[0][1] = fmaf(s0, t[1], acc[0][1]);
                acc[0][2] = fmaf(s1, t[2], acc[0][2]); acc[0][3] = fmaf(s1, t[3], acc[0][3]);
                if constexpr (W::kHasMin) {
                    constexpr float kPer = W::kBias ? 1.0f / W::kBias : 1.0f;
                    m0 *= kPer; m1 *= kPer;
                    acc[0][0] = fmaf(m0, bias.x, acc[0][0]); acc[0][1] = fmaf(m0, bias.y, acc[0][1]);
                    acc[0][2] = fmaf(m1, bias.x, acc[0][2]); acc[0][3] = fmaf(m1, bias.y, acc[0][3]);
                }
            }
        } else {
            if constexpr (W::kScaled) {
                constexpr int kParts = 32 / W::kGroup;
                const bf162 zero = __float2bfloat162_rn(-static_cast<float>(W::kBias));
#pragma unroll
                for (int p = 0; p < kParts; ++p) {
                    float s0, m0, s1, m1;
                    W::scale(r, b * kParts + p, 0, s0, m0);
                    W::scale(r, b * kParts + p, 1, s1, m1);
                    bf162 sl = __float2bfloat162_rn(s0), sh = __float2bfloat162_rn(s1);
                    bf162 ml = __float2bfloat162_rn(-m0), mh = __float2bfloat162_rn(-m1);
#pragma unroll
                    for (int i = p * (4 / kParts); i < (p + 1) * (4 / kParts); ++i) {
                        bf162 l = as_bf162(lo[i]), h = as_bf162(hi[i]);
                        if constexpr (W::kBias != 0) {
                            l = __hadd2(l, zero);
                            h = __hadd2(h, zero);
                        }
                        lo[i] = bits(W::kHasMin ? __hfma2(l, sl, ml) : __hmul2(l, sl));
                        hi[i] = bits(W::kHasMin ? __hfma2(h, sh, mh) : __hmul2(h, sh));
                    }
                }
            }
#pragma unroll
            for (int n = 0; n < kNT; ++n) {
                uint4 x = *reinterpret_cast<const uint4 *>(x_lane + n * x_group_bytes + b * 64);
                float(&d)[4] = Rows<kFormat>::kIsFp8 ? tmp[n] : acc[n];
                mma_bf16(d, lo[0], hi[0], lo[1], hi[1], x.x, x.y);
                mma_bf16(d, lo[2], hi[2], lo[3], hi[3], x.z, x.w);
                if constexpr (kFormat == PK_F16) {
                    uint32_t lo2[4], hi2[4];
                    rows_codes<PK_F16, 1>(r, b, 0, lo2);
                    rows_codes<PK_F16, 1>(r, b, 1, hi2);
                    mma_bf16(d, lo2[0], hi2[0], lo2[1], hi2[1], x.x, x.y);
                    mma_bf16(d, lo2[2], hi2[2], lo2[3], hi2[3], x.z, x.w);
                }
            }
        }
    }
    if constexpr (Rows<kFormat>::kIsFp8) {
#pragma unroll
        for (int n = 0; n < kNT; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[n][i] = fmaf(block_scale, tmp[n][i], acc[n][i]);
    }
}

// Which weight a row tile belongs to.
__device__ __forceinline__ int weight_of(const StreamArguments &a, int tile) {
    int i = 0;
    if (a.n_w > 1 && tile >= a.w[1].first_tile) i = 1;
    if (a.n_w > 2 && tile >= a.w[2].first_tile) i = 2;
    return i;
}

__device__ __forceinline__ void store_output(const StreamArguments &a, const StreamWeight &w, int n, int row, float v) {
    v *= a.scale;
    if (a.softcap > 0.0f) v = a.softcap * tanhf(v / a.softcap);
    int64_t column = w.first_column + row;
    if (a.add != nullptr) {
        const float old = load_as_f32(a.add, n * a.add_stride + column, a.add_format);
        v = a.act != PK_ACT_NONE && a.n_w == 1 ? activate(old, a.act) * v : v + old;
    }
    store_from_f32(a.y, n * a.y_stride + column, a.y_format, v);
}

template <int kFormat, int kNT, bool kGated>
__global__ void __launch_bounds__(kStreamThreads, kNT <= 4 ? 2 : 1) stream_matmul_kernel(const __grid_constant__ StreamArguments a) {
    using W = Weight<kFormat, is_block_format(kFormat)>;
    constexpr int kWarpsK = kNT <= 2 ? 8 : kNT == 4 ? 4 : 2, kWarpsM = 8 / kWarpsK;
    constexpr int kTileRows = 32 * kWarpsM, kOutRows = kGated ? 16 * kWarpsM : kTileRows, kN = 8 * kNT, kRed = kN + 1;
    extern __shared__ __align__(16) uint8_t shared[];
    __shared__ int is_last;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, wk = warp % kWarpsK, wm = warp / kWarpsK;
    const int slice = blockIdx.x % a.n_slices, stride = gridDim.x / a.n_slices;
    const int u0 = slice * a.units_per_slice, u1 = min(u0 + a.units_per_slice, a.n_units), k_count = a.units_per_slice * W::kU;
    uint8_t *xs = shared;
    float *sums = reinterpret_cast<float *>(xs + a.staged_rows * a.x_row_bytes);
    float *red = sums + (W::kScaled && kNT == 1 ? k_count / W::kGroup * 8 : 0);

    typename W::Registers regs[2];
    auto load = [&](int tile, int unit, int t) {
        int i = kGated ? 0 : weight_of(a, tile);
        int row0 = (tile - a.w[i].first_tile) * kOutRows + (kGated ? wm * 16 : wm * 32 + t * 16);
        const StreamWeight &w = a.w[kGated ? t : i];
        W::load(regs[t], w, min(row0, w.padded_rows - 16), unit, a.n_units, lane);
    };
    int tile = blockIdx.x / a.n_slices;
    const bool has_units = u0 + wk < u1;
    if (tile < a.n_tiles && has_units) {
        load(tile, u0 + wk, 0);
        load(tile, u0 + wk, 1);
    }
    wait_dependence();
    release_dependents();
    const int n_rows = rows_of(a.info, a.rows_symbol);
    if (n_rows < a.min_rows || n_rows > a.max_rows) return;
    stage_x<kFormat>(a, xs, u0 * W::kU, k_count, n_rows);
    __syncthreads();
    if constexpr (W::kScaled && kNT == 1) {
        if constexpr (W::kBias != 0 || W::kHasMin) {
            stage_sums<W>(a, xs, sums, k_count);
            __syncthreads();
        }
    }
    // Lanes beyond the staged rows read a staged one; their columns are never stored.
    const int x_row = (lane >> 2) % min(a.staged_rows, 8);
    const uint8_t *x_lane = xs + x_row * a.x_row_bytes + (lane & 3) * 16;
    const int x_group_bytes = a.staged_rows >= 8 ? 8 * a.x_row_bytes : 0;

    for (; tile < a.n_tiles; tile += stride) {
        float acc[2][kNT][4] = {};
        for (int u = u0 + wk; u < u1; u += kWarpsK) {
            int next_u = u + kWarpsK, next_tile = tile;
            if (next_u >= u1) {
                next_u = u0 + wk;
                next_tile += stride;
            }
            const int local = u - u0;
            const float *sums_lane = sums + local * (W::kU / W::kGroup) * 8 + 2 * (lane & 3);
#pragma unroll
            for (int t = 0; t < 2; ++t) {
                float block_scale = 1.0f;
                if constexpr (Rows<kFormat>::kIsFp8) {
                    int i = kGated ? 0 : weight_of(a, tile);
                    const StreamWeight &w = a.w[kGated ? t : i];
                    int row0 = (tile - a.w[i].first_tile) * kOutRows + (kGated ? wm * 16 : wm * 32 + t * 16);
                    if (w.block_scale != nullptr) block_scale = __ldg(w.block_scale + (min(row0, w.padded_rows - 16) >> 7) * w.block_stride + u);
                }
                multiply<W, kFormat, kNT>(regs[t], acc[t], x_lane + local * W::kU * 2, x_group_bytes, sums_lane, block_scale);
                if (next_tile < a.n_tiles) load(next_tile, next_u, t);
            }
        }
        // The sums of the warps, then of the slices.
        __syncthreads();
        float *mine = red + (wk * kWarpsM + wm) * 32 * kRed;
#pragma unroll
        for (int t = 0; t < 2; ++t)
#pragma unroll
            for (int n = 0; n < kNT; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) mine[(t * 16 + (lane >> 2) + 8 * (i >> 1)) * kRed + n * 8 + 2 * (lane & 3) + (i & 1)] = acc[t][n][i];
        __syncthreads();
        auto total = [&](int row, int n) {
            float s = 0.0f;
#pragma unroll
            for (int k = 0; k < kWarpsK; ++k) s += red[(k * kWarpsM * 32 + row) * kRed + n];
            return s;
        };
        const int i = kGated ? 0 : weight_of(a, tile);
        const int base = (tile - a.w[i].first_tile) * kOutRows;
        if (a.n_slices > 1) {
            float *part = a.partial + (static_cast<int64_t>(slice) * a.n_tiles + tile) * kTileRows * kN;
            for (int j = threadIdx.x; j < n_rows * kTileRows; j += kStreamThreads) __stcg(part + j, total(j % kTileRows, j / kTileRows));
            __threadfence();
            __syncthreads();
            if (threadIdx.x == 0) is_last = atomicAdd(a.counters + tile, 1) == a.n_slices - 1;
            __syncthreads();
            if (!is_last) continue;
            __threadfence();
            if (threadIdx.x == 0) a.counters[tile] = 0;
        }
        auto value = [&](int row, int n) {
            if (a.n_slices == 1) return total(row, n);
            float s = 0.0f;
            for (int k = 0; k < a.n_slices; ++k) s += __ldcg(a.partial + (static_cast<int64_t>(k) * a.n_tiles + tile) * kTileRows * kN + n * kTileRows + row);
            return s;
        };
        auto finish = [&](const StreamWeight &w, int row, float v) {
            v *= w.scale;
            if (w.row_scale != nullptr) v *= w.row_scale[row];
            return w.bias != nullptr ? v + w.bias[row] : v;
        };
        for (int j = threadIdx.x; j < n_rows * kOutRows; j += kStreamThreads) {
            int row = j % kOutRows, n = j / kOutRows;
            const StreamWeight &w = a.w[i];
            if (base + row >= w.rows) continue;
            if constexpr (kGated) {
                int at = (row >> 4) * 32 + (row & 15);
                float gate = finish(a.w[0], base + row, value(at, n)), up = finish(a.w[1], base + row, value(at + 16, n));
                store_output(a, w, n, base + row, activate(gate, a.act) * up);
            } else {
                store_output(a, w, n, base + row, finish(w, base + row, value(row, n)));
            }
        }
    }
}

template <int kFormat, int kNT>
int32_t launch_groups(const Launch &l, const StreamShape &s, const StreamArguments &a) {
    auto kernel = a.act != PK_ACT_NONE && a.n_w == 2 ? stream_matmul_kernel<kFormat, kNT, true> : stream_matmul_kernel<kFormat, kNT, false>;
    return launch(l, "stream_matmul", kernel, dim3(s.n_blocks), dim3(kStreamThreads), s.shared_bytes, a);
}

}  // namespace

template <int kFormat>
int32_t launch_stream(const Launch &l, const StreamShape &s, const StreamArguments &a) {
    switch (s.n_tokens8) {
        case 1: return launch_groups<kFormat, 1>(l, s, a);
#if !defined(PK_WGMMA)  // the skinny kernel takes more rows
        case 2: return launch_groups<kFormat, 2>(l, s, a);
        case 4: return launch_groups<kFormat, 4>(l, s, a);
        case 8: return launch_groups<kFormat, 8>(l, s, a);
#endif
        default: return fail(PK_UNSUPPORTED, "matmul: the streaming kernel is not built for %d rows", 8 * s.n_tokens8);
    }
}

template int32_t launch_stream<PK_STREAM_FORMAT>(const Launch &, const StreamShape &, const StreamArguments &);

}  // namespace pk
