// How an even matmul ends (gemm_even.cuh). A warp has sums of 16 rows of x as wgmma leaves them: 4 j + 2 h + e is row lane / 4 + 8 h, column 8 j + 2 (lane % 4) + e.
#pragma once
#include "cluster.cuh"
#include "gemm_boxes.cuh"
#include "gemm_heads.cuh"
#include "gemm_store.cuh"

namespace pk {

// Columns in bf16 (with a bias); f32 with a residual, of which a norm's first half may be made; gate and up, whole or cut along K; queries, keys and values.
constexpr int kEndPlain = 0, kEndFront = 1, kEndGated = 2, kEndGatedCut = 3, kEndHeads = 4;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// A block is through with what others send into; all are. Nothing is published by it (what comes is counted by the receiver's barrier): a release would wait for every load under way.
__device__ __forceinline__ void tell_cluster() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void await_cluster() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
// To shared memory. Not is_real: nothing, by the same code.
__device__ __forceinline__ void keep(uint32_t to, bool is_real, float a, float b, float c, float d) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p st.shared.v4.f32 [%0], {%1, %2, %3, %4};\n}" ::"r"(to), "f"(a), "f"(b), "f"(c), "f"(d), "r"(static_cast<int>(is_real)) : "memory");
}
// To a block of the cluster, whose barrier counts the bytes.
__device__ __forceinline__ void send(uint32_t to, uint32_t barrier, bool is_real, float a, float b, float c, float d) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n@p st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];\n}" ::"r"(to), "f"(a), "f"(b), "f"(c), "f"(d), "r"(barrier), "r"(static_cast<int>(is_real)) : "memory");
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
#pragma unroll 8
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

// What is ended in pieces: groups of eight columns (gated: of gate and of up), dealt out among the blocks of a cluster. A warp ends what its own rows have of them,
// and others send it their sums into the ring's first stages: [warp][group][block][lane], float4.
template <int kM, int kWidth, int kEnd>
struct Deal {
    static constexpr bool kGated = kEnd == kEndGatedCut;
    static constexpr int kWarps = kM / 16, kItems = kEnd == kEndHeads || kEnd == kEndGated ? 0 : kGated ? kWidth / 16 : kWidth / 8, kFloats4 = kGated ? 2 : 1, kMostOwn = (kItems + 1) / 2, kPairs = (kMostOwn + 1) / 2;
    // Of so many parts: where a block's own groups begin, the most that one has, what a block receives.
    __device__ __forceinline__ static int begin(int n_parts, int rank) { return static_cast<uint32_t>(kItems * rank) / static_cast<uint32_t>(n_parts); }
    __device__ __forceinline__ static int most(int n_parts) { return static_cast<uint32_t>(kItems + n_parts - 1) / static_cast<uint32_t>(n_parts); }
    __device__ __forceinline__ static int bytes(int n_parts) { return kEnd == kEndHeads ? kWarps * 4096 : kWarps * most(n_parts) * n_parts * kFloats4 * 512; }
    __device__ __forceinline__ static int received(int n_parts, int rank, int n_rows) { return (n_rows + 15) / 16 * (kEnd == kEndHeads ? 4096 : (begin(n_parts, rank + 1) - begin(n_parts, rank)) * (n_parts - 1) * kFloats4 * 512); }
};

// What a block's outputs want beside their sums, of pairs of groups, four columns a lane: old values; gains of the norm's half, or biases.
template <int kPairs>
struct EndBeside {
    float4 old[kPairs > 0 ? kPairs : 1][2], gain[kPairs > 0 ? kPairs : 1];
};

// A lane's first column of a pair, counted from the pair's: even lanes have the first group's.
__device__ __forceinline__ int column_in_pair(int lane) { return 8 * (lane & 1) + 2 * (lane & 2); }

template <class D, int kEnd>
__device__ __forceinline__ void load_beside(const GemmArguments &a, const GemmWeight &w, int n0, int row, int lane, int n_parts, int rank, int n_rows, EndBeside<D::kPairs> &beside) {
    if constexpr (D::kMostOwn == 0 || kEnd == kEndGatedCut) return;
    const float *gains = kEnd == kEndFront ? a.norm.w : w.bias;
    const float4 none = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const int begin = D::begin(n_parts, rank), n_own = D::begin(n_parts, rank + 1) - begin;
#pragma unroll
    for (int i = 0; i < D::kPairs; ++i) {
        const int column = n0 + 8 * begin + 16 * i + column_in_pair(lane);
        const bool is_column = 2 * i + (lane & 1) < n_own && column < w.rows;
        beside.gain[i] = gains != nullptr && is_column ? __ldg(reinterpret_cast<const float4 *>(gains + column)) : none;
        if constexpr (kEnd == kEndFront) {
#pragma unroll
            for (int h = 0; h < 2; ++h)
                beside.old[i][h] = a.add != nullptr && is_column && row + 8 * h < n_rows ? __ldcg(reinterpret_cast<const float4 *>(static_cast<const float *>(a.add) + (row + 8 * h) * a.add_stride + column)) : none;
        }
    }
}

template <class D, int kWidth, int kEnd>
__device__ __forceinline__ void end_pieces(const GemmArguments &a, uint8_t *ring, uint64_t *received, int tile, const GemmWeight &w, int n0, int n_parts, int rank, int warp, int lane, int n_rows, bool is_real, const float *factors, const EndBeside<D::kPairs> &beside, const float (&sums)[kWidth / 2]) {
    constexpr int kBytes = D::kFloats4 * 512;
    const int most = D::most(n_parts), begin = D::begin(n_parts, rank), n_own = D::begin(n_parts, rank + 1) - begin;
    const uint32_t mine = shared_address(ring) + warp * most * n_parts * kBytes + lane * 16;
    if (is_real) await_cluster();
    if (!is_real || 16 * warp < n_rows) {
        int to = 0, next = D::begin(n_parts, 1);
        uint32_t at = mine + rank * kBytes;
#pragma unroll
        for (int i = 0; i < D::kItems; ++i) {
            if (i == next) {
                ++to;
                next = to + 1 == n_parts ? D::kItems : D::begin(n_parts, to + 1);
                at = mine + rank * kBytes;
            }
            const uint32_t there = address_at(at, to), barrier = address_at(shared_address(received), to);
#pragma unroll
            for (int j = 0; j < D::kFloats4; ++j) {
                const int v = 4 * i + j * (kWidth / 4);
                if (to == rank) keep(at + j * 512, is_real, sums[v], sums[v + 1], sums[v + 2], sums[v + 3]);
                else send(there + j * 512, barrier, is_real, sums[v], sums[v + 1], sums[v + 2], sums[v + 3]);
            }
            at += n_parts * kBytes;
        }
    }
    if (is_real) barrier_wait(received, 0);
    const int row = 16 * warp + (lane >> 2);
    const bool odd = lane & 1;
    float square[2] = {0.0f, 0.0f}, v[2 * D::kPairs][4 * D::kFloats4] = {};
#pragma unroll 1
    for (int part = 0; part < n_parts; ++part) {
        const float4 *from = reinterpret_cast<const float4 *>(ring + (warp * most * n_parts + part) * kBytes) + lane;
#pragma unroll
        for (int i = 0; i < D::kMostOwn; ++i) {
            if (i >= n_own) break;
#pragma unroll
            for (int j = 0; j < D::kFloats4; ++j) {
                const float4 u = from[(i * n_parts * D::kFloats4 + j) * 32];
                v[i][4 * j] += u.x; v[i][4 * j + 1] += u.y; v[i][4 * j + 2] += u.z; v[i][4 * j + 3] += u.w;
            }
        }
    }
#pragma unroll
    for (int i = 0; i < D::kPairs; ++i) {
        const int column = n0 + 8 * begin + 16 * i + column_in_pair(lane);
        if (2 * i >= n_own) break;
        const bool is_column = 2 * i + odd < n_own && column < w.rows;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int at = row + 8 * h;
            const bool is_in = is_column && at < n_rows;
            const float f = w.scale * a.scale * factors[at];
            float first[2], second[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                auto output = [&](const float (&sum)[4 * D::kFloats4]) {
                    if constexpr (kEnd == kEndGatedCut) return gated(sum[2 * h + e] * (w.scale * factors[at]), sum[4 + 2 * h + e] * (a.w[1].scale * a.scale * factors[at]));
                    else return sum[2 * h + e] * f;
                };
                first[e] = output(v[2 * i]);
                second[e] = output(v[2 * i + 1]);
            }
            // Two lanes have two groups' neighbouring columns: each gets four of one.
            const float p = __shfl_xor_sync(~0u, odd ? first[0] : second[0], 1), q = __shfl_xor_sync(~0u, odd ? first[1] : second[1], 1);
            float4 o = odd ? make_float4(p, q, second[0], second[1]) : make_float4(first[0], first[1], p, q);
            if constexpr (kEnd == kEndGatedCut) {
                store_where(is_in, static_cast<bf16 *>(a.y) + at * a.y_stride + w.first_column + column, make_uint2(pack_bf16(o.x, o.y), pack_bf16(o.z, o.w)));
                continue;
            }
            const float4 gain = beside.gain[i];
            if constexpr (kEnd == kEndPlain) {
                o = make_float4(o.x + gain.x * a.scale, o.y + gain.y * a.scale, o.z + gain.z * a.scale, o.w + gain.w * a.scale);
                store_where(is_in, static_cast<bf16 *>(a.y) + at * a.y_stride + w.first_column + column, make_uint2(pack_bf16(o.x, o.y), pack_bf16(o.z, o.w)));
                continue;
            }
            const float4 old = beside.old[i][h];
            o = make_float4(o.x + old.x, o.y + old.y, o.z + old.z, o.w + old.w);
            if (is_column) square[h] += o.x * o.x + o.y * o.y + o.z * o.z + o.w * o.w;
            store_where(is_in, static_cast<float *>(a.y) + at * a.y_stride + column, o);
            store_where(is_in && a.norm.out != nullptr, static_cast<bf16 *>(a.norm.out) + at * a.norm.out_stride + column, make_uint2(pack_bf16(o.x * gain.x, o.y * gain.y), pack_bf16(o.z * gain.z, o.w * gain.w)));
        }
    }
    if (kEnd == kEndFront && a.norm.out != nullptr) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            square[h] += __shfl_xor_sync(~0u, square[h], 1);
            square[h] += __shfl_xor_sync(~0u, square[h], 2);
            if ((lane & 3) == 0 && row + 8 * h < n_rows) a.norm.squares[(tile * n_parts + rank) * a.norm.stride + row + 8 * h] = square[h];
        }
    }
}

// Two blocks share a head: each ends eight of every warp's sixteen rows, and sends the sums of the others.
__device__ __forceinline__ void end_head(const GemmArguments &a, uint8_t *ring, uint64_t *received, const GemmWeight &w, int n0, int rank, int warp, int lane, int n_rows, bool is_real, const float *factors, const HeadBeside &beside, const float (&sums)[64]) {
    const uint32_t mine = shared_address(ring) + (warp * 8 * 32 + lane) * 16;
    if (is_real) await_cluster();
    const uint32_t there = address_at(mine, rank ^ 1), barrier = address_at(shared_address(received), rank ^ 1);
    if (!is_real || 16 * warp < n_rows) {
#pragma unroll
        for (int j = 0; j < 16; j += 2) send(there + j * 256, barrier, is_real, rank ? sums[4 * j] : sums[4 * j + 2], rank ? sums[4 * j + 1] : sums[4 * j + 3], rank ? sums[4 * j + 4] : sums[4 * j + 6], rank ? sums[4 * j + 5] : sums[4 * j + 7]);
    }
    const int row = 16 * warp + 8 * rank + (lane >> 2), head = (w.first_column + n0) >> 7;
    const float f = w.scale * a.scale * factors[row];
    float v[16][2], turns[16][2];
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
