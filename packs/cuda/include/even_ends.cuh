// How an even matmul ends (gemm_even.cuh). A warp has sums of 16 rows of x as wgmma leaves them: 4 j + 2 h + e is row lane / 4 + 8 h, column 8 j + 2 (lane % 4) + e.
#pragma once
#include "cluster.cuh"
#include "gemm_boxes.cuh"
#include "gemm_heads.cuh"
#include "gemm_store.cuh"
#include "narrow_row.cuh"

namespace pk {

// Columns in bf16 (with a bias); f32 with a residual, of which a norm's first half may be made; gate and up, whole or cut along K; queries, keys and values; f32 by
// blocks that have all of K.
constexpr int kMostClusterParts = 4;  // that K is cut into
constexpr int kEndPlain = 0, kEndFront = 1, kEndGated = 2, kEndGatedCut = 3, kEndHeads = 4, kEndWhole = 5;

// A number over the blocks of a cluster, one to four.
__device__ __forceinline__ int over_parts(int n, int n_parts) { return n_parts == 3 ? static_cast<int>(__umulhi(n, 0x55555556u)) : n >> (n_parts >> 1); }

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// A block is through with what others send into; all are. Nothing is published by it (what comes is counted by the receiver's barrier): a release would wait for every load under way.
__device__ __forceinline__ void tell_cluster() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void await_cluster() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
// To a block of the cluster, whose barrier counts the bytes; to this one's shared memory. Not is_real: nothing, by the same code.
__device__ __forceinline__ void send(uint32_t to, uint32_t barrier, bool is_real, float a, float b, float c, float d) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n@p st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];\n}" ::"r"(to), "f"(a), "f"(b), "f"(c), "f"(d), "r"(barrier), "r"(static_cast<int>(is_real)) : "memory");
}
__device__ __forceinline__ void lay(uint32_t to, bool is_real, float a, float b, float c, float d) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p st.shared.v4.f32 [%0], {%1, %2, %3, %4};\n}" ::"r"(to), "f"(a), "f"(b), "f"(c), "f"(d), "r"(static_cast<int>(is_real)) : "memory");
}
// What the sums of rows of x are multiplied by: 1 / rms, or one where no norm is left over. Three warps, each adds a third of the squares, of a block's columns each.
template <int kM>
__device__ __forceinline__ void even_factors(const HalfNorm &norm, int n_squares, int mine, int lane, float *sums, float *factors) {
    if (norm.row_squares == nullptr) {
        for (int n = lane + 32 * mine; n < kM; n += 96) factors[n] = 1.0f;
        __syncwarp();
        return;
    }
    constexpr int kQuads = kM / 4, kAtOnce = 32 / kQuads;
    const int quad = lane % kQuads;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (4 * quad < norm.stride) {
#pragma unroll 4
        for (int p = mine * kAtOnce + lane / kQuads; p < n_squares; p += 3 * kAtOnce) {
            const float4 v = __ldcg(reinterpret_cast<const float4 *>(norm.row_squares + p * norm.stride) + quad);
            sum.x += v.x; sum.y += v.y; sum.z += v.z; sum.w += v.w;
        }
    }
    if constexpr (kAtOnce == 2) {
        sum.x += __shfl_xor_sync(~0u, sum.x, 16);
        sum.y += __shfl_xor_sync(~0u, sum.y, 16);
        sum.z += __shfl_xor_sync(~0u, sum.z, 16);
        sum.w += __shfl_xor_sync(~0u, sum.w, 16);
    }
    reinterpret_cast<float4 *>(sums + mine * kM)[quad] = sum;
    asm volatile("bar.sync 2, 96;" ::: "memory");
    for (int n = lane + 32 * mine; n < kM; n += 96) factors[n] = rsqrtf((sums[n] + sums[kM + n] + sums[2 * kM + n]) / norm.n_cols + norm.eps);
    __syncwarp();
}

__device__ __forceinline__ float gated(float gate, float up) { return __fdividef(gate, 1.0f + __expf(-gate)) * up; }

// Columns n0 on of gate in the first half of the sums, of up in the second.
template <int kWidth>
__device__ __forceinline__ void end_gated(const GemmArguments &a, int n0, int m0, int lane, int n_rows, const float (&factor)[2], const float (&sums)[kWidth / 2]) {
    const GemmWeight &w = a.w[0];
    const int c = lane & 3, row = m0 + (lane >> 2);
    bf16 *y = static_cast<bf16 *>(a.y) + row * a.y_stride + w.first_column + n0 + 8 * c;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float f = w.scale * factor[h], g = a.w[1].scale * a.scale * factor[h];
        const bool is_in = row + 8 * h < n_rows;
        auto pair = [&](int j) {
            const int i = 4 * j + 2 * h, twin = i + kWidth / 4;
            return pack_bf16(gated(sums[i] * f, sums[twin] * g), gated(sums[i + 1] * f, sums[twin + 1] * g));
        };
        if constexpr (kWidth == 256) {
            if (a.narrowed.x != nullptr) {
                uint32_t pairs[16];
#pragma unroll
                for (int j = 0; j < 16; ++j) pairs[j] = pair(j);
                store_narrowed(a.narrowed, n0, row + 8 * h, c, is_in, pairs);
                if (a.narrowed.is_all) continue;
            }
        }
        // Pairs of columns of four lanes put together, 16 bytes a store.
#pragma unroll
        for (int j = 0; j < kWidth / 16; j += 4) {
            const uint4 v = gather_columns(pair(j), pair(j + 1), pair(j + 2), pair(j + 3), c);
            store_where(is_in && n0 + 8 * (j + c) < w.rows, y + 8 * h * a.y_stride + 8 * j, v);
        }
    }
}

// A lane's first column of a pair of groups of eight, which two lanes deal: even ones have the first group's.
__device__ __forceinline__ int column_in_pair(int lane) { return 8 * (lane & 1) + 2 * (lane & 2); }
// Two neighbouring lanes' columns of two groups, two of each: four of one.
__device__ __forceinline__ float4 four_of_one(float4 v, int lane) {
    const bool odd = lane & 1;
    const float p = __shfl_xor_sync(~0u, odd ? v.x : v.z, 1), q = __shfl_xor_sync(~0u, odd ? v.y : v.w, 1);
    return odd ? make_float4(p, q, v.z, v.w) : make_float4(v.x, v.y, p, q);
}

// What blocks of a cluster end together. Each has sums of a part of K; of every warp's sixteen rows a block ends its own, all columns of the tile (so that a row's 128 columns
// meet in a warp), and others send it their sums of them into the ring's first stages: [warp][block][row][column].
template <int kM, int kWidth, int kEnd>
struct Deal {
    static constexpr int kWarps = kM / 16, kMostOwn = 8, kLanes = kEnd == kEndGatedCut ? kWidth / 8 : kWidth / 4;  // lanes that have columns, four each
    // From a row to the next: neighbours lie in different banks.
    static constexpr int kRowBytes = kWidth * 4, kPitch = kRowBytes % 128 == 64 ? kRowBytes : kRowBytes + 64;
    // Of so many parts: where a block's own rows begin, the most that one has, whose a row is, what a block receives.
    __device__ __forceinline__ static int begin(int n_parts, int rank) { return over_parts(16 * rank, n_parts); }
    __device__ __forceinline__ static int most(int n_parts) { return over_parts(16 + n_parts - 1, n_parts); }
    __device__ __forceinline__ static int owner(int n_parts, int row) { return (n_parts * (row + 1) - 1) >> 4; }
    __device__ __forceinline__ static int bytes(int n_parts) { return kWarps * (kEnd == kEndHeads ? 4096 : most(n_parts) * n_parts * kPitch); }
    __device__ __forceinline__ static int received(int n_parts, int rank, int n_rows) { return (n_rows + 15) / 16 * (kEnd == kEndHeads ? 4096 : (begin(n_parts, rank + 1) - begin(n_parts, rank)) * (n_parts - 1) * kRowBytes); }
};

// What a block's own rows want beside their sums, four columns a lane: old values; gains of the norm's half, or biases.
struct EndBeside {
    float4 old[8], gain;
};

// A lane's first column of those that four_of_one leaves it.
__device__ __forceinline__ int column_of(int lane) { return 16 * (lane >> 2) + column_in_pair(lane); }

template <class D, int kEnd>
__device__ __forceinline__ void load_beside(const GemmArguments &a, const GemmWeight &w, int n0, int warp, int lane, int n_parts, int rank, int n_rows, EndBeside &beside) {
    if constexpr (kEnd != kEndFront && kEnd != kEndPlain) return;
    const float *gains = kEnd == kEndFront ? a.norm.w : w.bias;
    const float4 none = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const int column = n0 + column_of(lane);
    const bool is_column = lane < D::kLanes && column < w.rows;
    beside.gain = gains != nullptr && is_column ? __ldg(reinterpret_cast<const float4 *>(gains + column)) : none;
    if constexpr (kEnd == kEndFront) {
        const int begin = D::begin(n_parts, rank), row = 16 * warp + begin, n_real = a.add != nullptr && is_column ? min(D::begin(n_parts, rank + 1) - begin, n_rows - row) : 0;
        const float *old = static_cast<const float *>(a.add) + row * a.add_stride + column;
#pragma unroll
        for (int i = 0; i < D::kMostOwn; ++i, old += a.add_stride) beside.old[i] = i < n_real ? __ldcg(reinterpret_cast<const float4 *>(old)) : none;
    }
}

// 128 columns of a row from column n0 on, four a lane from column_of on.
__device__ __forceinline__ void narrow_row(const Narrowed &to, int n0, int row, int lane, bool is_in, float4 v) {
    float scale;
    const uint32_t codes = codes_of_row(v, scale);
    store_where(is_in, to.x + row * to.row_bytes + n0 + column_of(lane), codes);
    if (is_in && lane == 0) to.scales[(n0 >> 7) * to.scale_stride + row] = scale;
}

// Sums of eight rows over a warp, as warp_sum makes each; a lane gets the row of its upper three bits, highest first.
__device__ __forceinline__ float sum_of_eight(const float (&rows)[8], int lane) {
    float four[4], two[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float other = __shfl_xor_sync(~0u, lane & 16 ? rows[i] : rows[i + 4], 16);
        four[i] = (lane & 16 ? rows[i + 4] : rows[i]) + other;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float other = __shfl_xor_sync(~0u, lane & 8 ? four[i] : four[i + 2], 8);
        two[i] = (lane & 8 ? four[i + 2] : four[i]) + other;
    }
    float one = (lane & 4 ? two[1] : two[0]) + __shfl_xor_sync(~0u, lane & 4 ? two[0] : two[1], 4);
    one += __shfl_xor_sync(~0u, one, 2);
    return one + __shfl_xor_sync(~0u, one, 1);
}

// Whether a warp goes through a section of an end: of one that is rehearsed each has its own, so that code that is not there yet comes for all of them side by side.
template <class D>
__device__ __forceinline__ bool is_in(int section, int warp, bool is_real) { return is_real || warp == section % D::kWarps; }

// ring: where this block receives; further: how much further another one does; ask_beside: what is wanted beside the sums, while those are under way. FP8: what is left for a norm's second half is narrowed, and gated columns where they are wanted so.
template <class D, bool kIsFp8, int kWidth, int kEnd, class Further, class Ask>
__device__ __forceinline__ void end_rows(const GemmArguments &a, uint8_t *ring, const Further &further, uint64_t *received, int tile, const GemmWeight &w, int n0, int n_parts, int rank, int warp, int lane, int n_rows, bool is_real, const float *factors, const Ask &ask_beside, const float (&sums)[kWidth / 2]) {
    constexpr bool kGated = kEnd == kEndGatedCut;
    constexpr int kTogether = kWidth == 112 && !kGated ? 6 : 4;  // rows, whose shuffles and stores are under way at once: all that a block of three ends
    const int most = D::most(n_parts), begin = D::begin(n_parts, rank), n_own = D::begin(n_parts, rank + 1) - begin;
    const int region = warp * most * n_parts * D::kPitch;
    if (is_real) await_cluster();
    if (!is_real || 16 * warp < n_rows) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (!is_in<D>(h, warp, is_real)) continue;
            const int in = (lane >> 2) + 8 * h, to = D::owner(n_parts, in);
            const uint32_t mine = shared_address(ring) + region + (rank * most + in - D::begin(n_parts, to)) * D::kPitch + 16 * (lane & 3);
            const uint32_t there = address_at(mine + further(to), to), barrier = address_at(shared_address(received), to);
            if (to != rank) {
#pragma unroll
                for (int j = 0; j < kWidth / 16; ++j) send(there + 64 * j, barrier, is_real, sums[8 * j + 2 * h], sums[8 * j + 2 * h + 1], sums[8 * j + 2 * h + 4], sums[8 * j + 2 * h + 5]);
            } else {
#pragma unroll
                for (int j = 0; j < kWidth / 16; ++j) lay(mine + 64 * j, is_real, sums[8 * j + 2 * h], sums[8 * j + 2 * h + 1], sums[8 * j + 2 * h + 4], sums[8 * j + 2 * h + 5]);
            }
        }
    }
    __syncwarp();
    EndBeside beside;
    if (is_in<D>(5, warp, is_real)) ask_beside(beside);
    if (is_real) barrier_wait(received, 0);
    const bool has_columns = lane < D::kLanes;
    const int column = n0 + column_of(lane), row = 16 * warp + begin, n_real = min(n_own, n_rows - row);
    const bool is_column = has_columns && column < w.rows;
    const float f = w.scale * (kGated ? 1.0f : a.scale), g = kGated ? a.w[1].scale * a.scale : 0.0f;
    const uint8_t *from = ring + region + 16 * (has_columns ? lane : 0);
    // Of the next row.
    bf16 *y = static_cast<bf16 *>(a.y) + (kEnd == kEndFront ? 2 : 1) * (row * a.y_stride + column) + (kEnd == kEndFront ? 0 : w.first_column), *left = static_cast<bf16 *>(a.norm.out) + row * a.norm.out_stride + column;
    float squares[D::kMostOwn] = {};
#pragma unroll
    for (int first = 0; first < D::kMostOwn; first += kTogether) {
        if (!is_in<D>(2 + first / kTogether, warp, is_real) || (is_real && first >= n_own)) continue;
        float4 v[kTogether], up[kGated ? kTogether : 1];
#pragma unroll
        for (int i = 0; i < min(kTogether, D::kMostOwn - first); ++i) {
            v[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if constexpr (kGated) up[i] = v[i];
        }
        const uint8_t *part_from = from + first * D::kPitch;
#pragma unroll 1
        for (int part = 0; part < n_parts; ++part, part_from += most * D::kPitch) {
#pragma unroll
            for (int i = 0; i < min(kTogether, D::kMostOwn - first); ++i) {
                const float4 u = *reinterpret_cast<const float4 *>(part_from + i * D::kPitch);
                v[i].x += u.x; v[i].y += u.y; v[i].z += u.z; v[i].w += u.w;
                if constexpr (kGated) {
                    const float4 t = *reinterpret_cast<const float4 *>(part_from + i * D::kPitch + D::kRowBytes / 2);
                    up[i].x += t.x; up[i].y += t.y; up[i].z += t.z; up[i].w += t.w;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < min(kTogether, D::kMostOwn - first); ++i, y += (kEnd == kEndFront ? 2 : 1) * a.y_stride, left += a.norm.out_stride) {
            const bool is_stored = is_column && first + i < n_real;
            const float factor = factors[row + first + i], own = f * factor;
            float4 o = make_float4(v[i].x * own, v[i].y * own, v[i].z * own, v[i].w * own);
            if constexpr (kGated) {
                const float own_up = g * factor;
                o = make_float4(gated(o.x, up[i].x * own_up), gated(o.y, up[i].y * own_up), gated(o.z, up[i].z * own_up), gated(o.w, up[i].w * own_up));
            }
            o = four_of_one(o, lane);
            auto pairs = [&] { return make_uint2(pack_bf16(o.x, o.y), pack_bf16(o.z, o.w)); };
            if constexpr (kGated) {
                bool is_narrowed = false;
                if constexpr (kIsFp8) {
                    if (a.narrowed.x != nullptr) {
                        narrow_row(a.narrowed, n0, row + first + i, lane, is_stored, o);
                        is_narrowed = a.narrowed.is_all;
                    }
                }
                store_where(is_stored && !is_narrowed, y, pairs());
            } else if constexpr (kEnd == kEndPlain) {
                const float4 bias = beside.gain;
                o = make_float4(o.x + bias.x * a.scale, o.y + bias.y * a.scale, o.z + bias.z * a.scale, o.w + bias.w * a.scale);
                store_where(is_stored, y, pairs());
            } else {
                const float4 old = beside.old[first + i], gain = beside.gain;
                o = make_float4(o.x + old.x, o.y + old.y, o.z + old.z, o.w + old.w);
                store_where(is_stored, reinterpret_cast<float *>(y), o);
                squares[first + i] = is_column ? o.x * o.x + o.y * o.y + o.z * o.z + o.w * o.w : 0.0f;
                o = make_float4(o.x * gain.x, o.y * gain.y, o.z * gain.z, o.w * gain.w);
                const bool is_left = is_stored && a.norm.squares != nullptr;
                if constexpr (kIsFp8) narrow_row(a.narrowed, n0, row + first + i, lane, is_left, o);
                else store_where(is_left, left, pairs());
            }
        }
    }
    if constexpr (kEnd == kEndFront) {
        if (a.norm.squares == nullptr || !is_in<D>(4, warp, is_real)) return;
        const float square = sum_of_eight(squares, lane);
        if ((lane & 3) == 0 && (lane >> 2) < n_real) a.norm.squares[tile * a.norm.stride + row + (lane >> 2)] = square;
    }
}

// Two blocks share a head: each ends eight of every warp's sixteen rows, and sends the sums of the others. ring: where it receives; further: how much further the other one does.
__device__ __forceinline__ void end_head(const GemmArguments &a, uint8_t *ring, int further, uint64_t *received, const GemmWeight &w, int n0, int rank, int warp, int lane, int n_rows, bool is_real, const float *factors, const HeadBeside &beside, const float (&sums)[64]) {
    const uint32_t mine = shared_address(ring) + (warp * 8 * 32 + lane) * 16;
    if (is_real) await_cluster();
    const uint32_t there = address_at(mine + further, rank ^ 1), barrier = address_at(shared_address(received), rank ^ 1);
    if (!is_real || 16 * warp < n_rows) {
#pragma unroll
        for (int j = 0; j < 16; j += 2) send(there + j * 256, barrier, is_real, rank ? sums[4 * j] : sums[4 * j + 2], rank ? sums[4 * j + 1] : sums[4 * j + 3], rank ? sums[4 * j + 4] : sums[4 * j + 6], rank ? sums[4 * j + 5] : sums[4 * j + 7]);
    }
    const int row = 16 * warp + 8 * rank + (lane >> 2), head = (w.first_column + n0) >> 7;
    const float f = w.scale * a.scale * factors[row];
    float v[16][2], turns[16][2] = {};  // values and keys alike, or the last tile's would be kept over the products
    turn_head(a.heads, head, row, lane & 3, beside, turns);  // while the sums are under way
    if (is_real) barrier_wait(received, 0);
#pragma unroll
    for (int j = 0; j < 16; j += 2) {
        float u[4];
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(u[0]), "=f"(u[1]), "=f"(u[2]), "=f"(u[3]) : "r"(mine + j * 256) : "memory");
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int e = 0; e < 2; ++e) v[j + i][e] = ((rank ? sums[4 * (j + i) + 2 + e] : sums[4 * (j + i) + e]) + u[2 * i + e]) * f;
    }
    if (w.bias != nullptr) {
#pragma unroll
        for (int j = 0; j < 16; ++j) {
            const float2 b = __ldg(reinterpret_cast<const float2 *>(w.bias + n0 + 8 * j + 2 * (lane & 3)));
            v[j][0] += b.x * a.scale;
            v[j][1] += b.y * a.scale;
        }
    }
    store_head(a, head, row, lane & 3, n_rows, beside, turns, v);
}
#endif

}  // namespace pk
