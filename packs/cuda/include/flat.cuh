// Flat matmul on Hopper: y[rows, N] = x[rows, K] W^T for 3 to 32 rows, K whole in a block (or in a pair of blocks).
//
// A block takes neighbouring tiles of 16 rows of W and all of their K, so that nothing is added up in memory. One warp copies
// boxes of a tile (16 rows x 128 bytes, swizzled) into a ring, before the kernels ahead are done; one copies the same K of x
// behind them; eight warps, kWM along the tiles and the others along K, multiply by mma.sync and meet once at the end, in shared
// memory. A pair of blocks halves K, and with it what each reads of x, and sends sums to each other. Gated tiles are eight rows of
// gate and eight of up, so that a lane has both. Does not handle: more than 32 rows, block formats.
#pragma once
#include "boxes.cuh"
#include "dealt_tiles.cuh"
#include "flat_end.cuh"

namespace pk {

// Gated weights: boxes of the tiles that every pass has, of gate and up, then of one tile more.
struct FlatMaps {
    CUtensorMap w[4], x;
};

// How a launch is dealt out: tiles of every block, blocks with one more, tiles a pass of a block at most, stages of the ring, stages of weights under way, the second and the
// third weight's first tiles. scale: of all weights together, where an end is plain (flat_launch.cuh). sums: where a pass's sums lie, in bytes; 0: in the ring, which waits for them.
// is_wide: one weight, whose every block has boxes of base_tiles tiles. has_whole_x: x comes in one box a stage.
// One line of the constants' cache, in which a launch's arguments are never found: with another line for each, the first weights are asked for a microsecond later.
struct alignas(64) FlatDeal {
    int32_t each, more, n_passes, pass_tiles, base_tiles, n_stages, under_way, steps;  // steps: stages of K of a block
    int32_t first_tile[2], may_be_idle, pass_share;  // pass_share: 2^16 / n_passes, rounded up
    float scale;
    int32_t sums;
    int16_t is_wide, has_whole_x;
};

// What is done with a sum that is neither stored as it is nor added to: rare, so that its code lies elsewhere.
static __device__ __noinline__ float unusual_output(float out, float old, int32_t act, float softcap) {
    if (act != PK_ACT_NONE) out *= activate(old, act);
    if (softcap > 0.0f) out = softcap * quick_tanh(out / softcap);
    return act != PK_ACT_NONE ? out : out + old;
}

template <int kFormat, int kNT, int kWM, int kT, int kSteps, int kSplit, int kPair, bool kPlain>
__global__ void __launch_bounds__(FlatShape<kFormat, kNT, kWM, kT, kSteps, kSplit, kPair>::kThreads, 1) flat_kernel(const __grid_constant__ FlatDeal deal, const __grid_constant__ FlatMaps maps, const __grid_constant__ SkinnyArguments a, const __grid_constant__ FlatPackets packets) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using S = FlatShape<kFormat, kNT, kWM, kT, kSteps, kSplit, kPair>;
    constexpr bool kGated = kSplit == kTileGated, kHeads = kSplit >= kTileHeads, kHalved = kSplit != kTileWhole;
    extern __shared__ uint8_t raw[];
    __shared__ uint64_t w_full[kFlatStages], x_full[kFlatStages], x_raw[S::kHalfX ? kFlatStages : 1], empty[kFlatStages], is_summed, are_factored, has_received;
    alignas(16) __shared__ float factors[kNT], half_sums[2][kNT];
    const uint32_t ring = (shared_address(raw) + 1023) & ~1023u;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, rank = kPair == 2 ? blockIdx.x & 1 : 0, me = blockIdx.x / kPair;
    const int w_pitch = deal.pass_tiles * S::kTileBytes, n_stages = deal.n_stages;
    const uint32_t x_ring = ring + n_stages * w_pitch, received = x_ring + n_stages * S::kXBytes, x_factors = received + S::kReceived, sums = ring + deal.sums;
    const int begin = me * deal.each + min(me, deal.more), end = begin + deal.each + (me < deal.more), n_passes = min(deal.n_passes, end - begin);
    if (lane == 0) {
#pragma unroll 1
        for (int i = warp; i < n_stages; i += S::kThreads / 32) {
            barrier_init(w_full + i, 1);
            barrier_init(x_full + i, S::kHalfX ? 4 : 1);
            if constexpr (S::kHalfX) barrier_init(x_raw + i, 1);
            barrier_init(empty + i, kFlatWarps);
        }
        if (warp == 0) {
            barrier_init(&is_summed, kFlatWarps);
            barrier_init(&are_factored, 2);
            barrier_init(&has_received, 1);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if constexpr (kPair == 2) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    release_dependents();
    const bool may_be_idle = deal.may_be_idle;
    auto pass_begin = [&](int pass) { return begin + ((end - begin) * pass * deal.pass_share >> 16); };
    auto weight_of = [&](int tile) { return weight_of_tile<kGated>(deal.first_tile, tile); };
    auto row_of = [&](int tile, int i) { return row_of_tile<kGated, kHeads>(deal.first_tile, tile, i); };

    // Nobody goes before all of a pair have come.
    auto leave = [] {
        if constexpr (kPair == 2) {
            __syncwarp();
            asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
        }
    };
    if (warp >= kFlatWarps) {
        fewer_registers<S::kHalfX ? 56 : 88>();
        const int n_stage_steps = deal.steps, first_stage = rank * n_stage_steps;
        if (warp == kFlatWarps) {
            int stage = 0, landing = 0, sent = 0;
            uint32_t phase = 0, landing_phase = 0;
            // Weights do not depend on the kernels before: the ring is filled while those still run, unless this launch may be idle.
            if (may_be_idle) {
                wait_dependence();
                if (rows_here<kNT>(a) <= 0) return leave();
            }
            for (int pass = 0; pass < n_passes; ++pass) {
                const int first = pass_begin(pass), n_here = pass_begin(pass + 1) - first;
                if (pass > 0 && deal.sums == 0) barrier_wait(&is_summed, (pass - 1) & 1);
                // A lane's own copy: of a tile, or of a half of it, or (gated, or of one weight) of what all passes have and of one tile more.
                const int base = deal.base_tiles;
                bool copies;
                int row, z = 0;
                uint32_t to = ring;
                const CUtensorMap *map;
                if constexpr (kGated) {
                    const int side = lane & 1, more = lane >> 2, chunk = lane >> 1 & 1;
                    copies = lane < 4 * (n_here > base ? 2 : 1) && chunk < S::kChunks;
                    row = (first + more * base) * 8;
                    z = chunk;
                    to += more * base * S::kTileBytes + (side * S::kChunks + chunk) * (more ? 1 : base) * 1024;
                    map = maps.w + 2 * more + side;
                } else if (!kHalved && deal.is_wide) {
                    copies = lane < (n_here > base ? 2 : 1);
                    row = (first + lane * base) * 16;
                    to += lane * base * S::kTileBytes;
                    map = maps.w + lane;
                } else {
                    const int j = kHalved ? lane >> 1 : lane, side = kHalved ? lane & 1 : 0, tile = first + min(j, n_here - 1), i = weight_of(tile);
                    copies = j < n_here;
                    row = row_of(tile, i) + 64 * side;
                    to += j * S::kTileBytes + side * S::kChunks * 1024;
                    map = maps.w + i;
                }
#pragma unroll 1
                for (int s = 0; s < n_stage_steps; ++s) {
                    if (sent >= deal.under_way) {
                        barrier_wait(w_full + landing, landing_phase);
                        if (++landing == n_stages) {
                            landing = 0;
                            landing_phase ^= 1;
                        }
                    }
                    ++sent;
                    barrier_wait(empty + stage, phase ^ 1);
                    if (lane == 0) barrier_expect(w_full + stage, n_here * S::kTileBytes);
                    __syncwarp();
                    if (copies) copy_box3_once(to + stage * w_pitch, map, 0, row, (first_stage + s) * S::kChunks + z, w_full + stage);
                    if (++stage == n_stages) {
                        stage = 0;
                        phase ^= 1;
                    }
                }
            }
            return leave();
        }
        wait_dependence();
        if (may_be_idle && rows_here<kNT>(a) <= 0) return leave();
        if (warp == kFlatWarps + 1) {
            int stage = 0;
            uint32_t phase = 0;
            for (int pass = 0; pass < n_passes; ++pass) {
                if (pass > 0 && deal.sums == 0) barrier_wait(&is_summed, (pass - 1) & 1);
#pragma unroll 1
                for (int s = 0; s < n_stage_steps; ++s) {
                    barrier_wait(empty + stage, phase ^ 1);
                    uint64_t *landed = S::kHalfX ? x_raw + stage : x_full + stage;
                    if (lane == 0) barrier_expect(landed, S::kXBytes);
                    __syncwarp();
                    if (deal.has_whole_x) {
                        if (lane == 0) copy_columns(x_ring + stage * S::kXBytes, &maps.x, (first_stage + s) * S::kXBoxes, landed);
                    } else if (lane < S::kXBoxes) copy_box_at(x_ring + stage * S::kXBytes + lane * kNT * 128, &maps.x, (first_stage + s) * S::kStageK + lane * 64, 0, landed);
                    if (++stage == n_stages) {
                        stage = 0;
                        phase ^= 1;
                    }
                }
            }
            return leave();
        }
        if (S::kHalfX && warp >= kFlatWarps + 4) {
            int stage = 0;
            uint32_t phase = 0;
#pragma unroll 1
            for (int s = 0; s < n_passes * n_stage_steps; ++s) {
                barrier_wait(x_raw + stage, phase);
#pragma unroll
                for (int part = 0; part < S::kStageK / 256; ++part) halve_x<kNT>(x_ring + stage * S::kXBytes + part * kNT * 512, x_factors + stage * S::kFactorBytes + part * kNT * 4, warp - kFlatWarps - 4, lane);
                fence_async_proxy();
                __syncwarp();
                if (lane == 0) barrier_arrive(x_full + stage);
                if (++stage == n_stages) {
                    stage = 0;
                    phase ^= 1;
                }
            }
            return leave();
        }
        row_factors<kNT>(a.norm, warp - kFlatWarps - 2, lane, half_sums, factors);
        if (lane == 0) barrier_arrive(&are_factored);
        return leave();
    }
    more_registers<S::kHalfX ? 200 : 208>();
    const int wm = warp % kWM, wk = warp / kWM, r = lane >> 2, q = lane & 3;
    if (kPair == 2) {
        asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
        if (threadIdx.x == 0) barrier_expect(&has_received, (((end - begin) * S::kN8 + 1 - rank) / 2) * 512);
    }
    int n_rows = 0;
    uint32_t now = 0;
    int stage = 0;
    uint32_t phase = 0;
    float acc[kT][S::kN8][4];
    auto head_of = [&](int tile) {
        const int i = weight_of(tile);
        return (a.w[i].first_column + row_of(tile, i)) >> 7;
    };
    // What a fragment's outputs want beside its sums: old values, gains of the norm's half.
    auto ask_beside = [&](int tile, int n8, float (&old)[4], float (&gain)[2]) {
        if constexpr (!kHalved) load_beside(a, a.w[weight_of(tile)], row_of(tile, weight_of(tile)) + r, [&](int e) { return n8 + 2 * q + e; }, n_rows, old, gain);
    };
    auto finish = [&](int tile, int n8, const float (&v)[4], const float (&old)[4], const float (&gain)[2]) {
        const int i = weight_of(tile), row = row_of(tile, i) + r;
        const SkinnyWeight &w = a.w[i];
        if constexpr (kGated) {
            end_gated(a, row, [&](int e) { return n8 + 2 * q + e; }, n_rows, factors, v);
        } else {
            float squares[2] = {0.0f, 0.0f};
            const bool is_usual = a.act == PK_ACT_NONE && a.softcap <= 0.0f;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                if (row + 8 * h >= w.rows) continue;
                const float f0 = w.scale * a.scale * (w.row_scale ? w.row_scale[row + 8 * h] : 1.0f), b0 = w.bias ? w.bias[row + 8 * h] * a.scale : 0.0f;
                const int64_t column = w.first_column + row + 8 * h;
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int n = n8 + 2 * q + e;
                    float out = v[2 * h + e] * (f0 * factors[n]) + b0;
                    if (is_usual) out += old[2 * h + e];
                    else out = unusual_output(out, old[2 * h + e], a.act, a.softcap);
                    if (n >= n_rows) continue;
                    squares[e] += out * out;
                    if (a.y_format == PK_F32) static_cast<float *>(a.y)[n * a.y_stride + column] = out;
                    else static_cast<bf16 *>(a.y)[n * a.y_stride + column] = __float2bfloat16(out);
                    if (a.norm.out != nullptr) static_cast<bf16 *>(a.norm.out)[n * a.norm.out_stride + column] = __float2bfloat16(out * gain[h]);
                }
            }
            if (a.norm.out != nullptr) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
#pragma unroll
                    for (int far = 4; far < 32; far *= 2) squares[e] += __shfl_xor_sync(~0u, squares[e], far);
                    if (r == 0 && n_rows > 0) a.norm.squares[tile * a.norm.stride + n8 + 2 * q + e] = squares[e];
                }
            }
        }
    };
    // The end is rehearsed, for no rows, while the kernels ahead still run: its code would come from memory behind the weights.
#pragma unroll 1
    for (int pass = n_passes > 0 ? -1 : 0; pass <= n_passes; ++pass) {
        if (pass == 0) {
            wait_dependence();
            n_rows = rows_here<kNT>(a);
            if (may_be_idle && n_rows <= 0) return;
            now = kHeads ? __ldcg(packets.numbers + blockIdx.x) + 1 : 0;
        }
        if (pass == n_passes) break;
        const bool is_real = pass >= 0;
        const int first = pass_begin(max(pass, 0)), n_here = pass_begin(max(pass, 0) + 1) - first;
        float old[4] = {}, gain[2] = {};
        HeadRows rows;  // the same for all of a warp's fragments
        HeadTurn turned;
        const int own = kPair == 2 ? 2 * warp + rank : warp;
        const int n_fragments = n_here * S::kN8;
        if (is_real) {
            uint32_t at[kT], half[kT];
            // Of the blocks of scales that a warp's K lies in: the first, how many more. Gated tiles of a pass begin in 128 rows or the next: two scales of gate, two of up.
            const int n_blocks_k = (a.k + 127) / 128, first_block = min((rank * deal.steps * S::kStageK + wk * kSteps * S::kStep) / 128, n_blocks_k - 1), last_block = n_blocks_k - 1 - first_block;
            // A lane asks for a scale, which all get by a shuffle: of tile `lane`, or (gated) of gate in the first 128 rows and the next, then of up.
            const float *own_scale = nullptr;
            uint32_t later = 0;
            if constexpr (S::kHalfX && kGated) {
                const SkinnyWeight &w = a.w[lane >> 1 & 1];
                if (w.block_scale) own_scale = w.block_scale + min((first * 8 >> 7) + (lane & 1), (w.rows - 1) >> 7) * w.block_stride + first_block;
#pragma unroll
                for (int t = 0; t < kT; ++t) later |= (((first + min(t * kWM + wm, n_here - 1)) * 8 >> 7) - (first * 8 >> 7)) << t;
            } else if constexpr (S::kIsFp8) {
                const int tile = first + min(min(lane, kT - 1) * kWM + wm, n_here - 1), i = weight_of(tile);
                const SkinnyWeight &w = a.w[i];
                if (w.block_scale) own_scale = w.block_scale + (min(row_of(tile, i), w.rows - 1) >> 7) * w.block_stride + first_block;
            }
            float coming = own_scale ? __ldg(own_scale) : 1.0f;
#pragma unroll
            for (int t = 0; t < kT; ++t) {
                // A warp that has no tile left multiplies the last one in vain.
                const int j = min(t * kWM + wm, n_here - 1), chunk = wk * kSteps / 4, base = deal.base_tiles;
                const bool is_wide = kGated || (!kHalved && deal.is_wide), is_more = is_wide && j == base;
                const int pitch = is_wide && !is_more ? base : 1;
                half[t] = kHalved ? S::kChunks * pitch * 1024 : 1024;
                at[t] = (is_more ? base * S::kTileBytes : j * (kGated ? 1024 : is_wide ? 2048 : S::kTileBytes)) + chunk * pitch * (kHalved ? 1024 : 2048);
                at[t] += S::kIsFp8 ? (lane >> 2) * 128 : (lane & 7) * 128 + (lane >> 3 & 1) * half[t];
#pragma unroll
                for (int n = 0; n < S::kN8; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e) acc[t][n][e] = 0.0f;
            }
            if (own < n_fragments) ask_beside(first + own / S::kN8, own % S::kN8 * 8, old, gain);
            if constexpr (kHeads) {
                rows = head_rows(a.heads, own % S::kN8 * 8, lane, n_rows);
                if (own < n_fragments) turned = head_turn(a.heads, rows, head_gains(a.heads, head_of(first + own / S::kN8), first + own / S::kN8, lane));
            }
#pragma unroll 1
            for (int s = 0; s < deal.steps; ++s) {
                float unit_scales[kT], twin_scales[2][2];
                if constexpr (S::kHalfX && kGated) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) twin_scales[i >> 1][i & 1] = __shfl_sync(~0u, coming, i);
                } else if constexpr (S::kIsFp8) {
#pragma unroll
                    for (int t = 0; t < kT; ++t) unit_scales[t] = __shfl_sync(~0u, coming, t);
                }
                if constexpr (S::kIsFp8) coming = own_scale && s + 1 < deal.steps ? __ldg(own_scale + min((s + 1) * (S::kStageK / 128), last_block)) : 1.0f;
                const uint32_t w_at = ring + stage * w_pitch, x_at = x_ring + stage * S::kXBytes;
                barrier_wait(w_full + stage, phase);
                barrier_wait(x_full + stage, phase);
                uint32_t used = 0;
                if constexpr (S::kHalfX) {
                    auto scale = [&](int t, int h) {
                        if constexpr (kGated) return later >> t & 1 ? twin_scales[h][1] : twin_scales[h][0];
                        else return unit_scales[t];
                    };
                    const uint32_t factors_at = x_factors + stage * S::kFactorBytes + wk * kSteps / 8 * kNT * 4;
                    constexpr int kOnce = kT * kNT > 64 ? 2 : kSteps;  // registers
#pragma unroll 1
                    for (int k = 0; k < kSteps; k += kOnce) used ^= flat_steps_f16<S, kNT, kT, kOnce>(acc, scale, at, half, w_at, x_at, factors_at, wk * kSteps + k, lane);
                } else {
#pragma unroll
                    for (int k = 0; k < kSteps; ++k) used ^= flat_step<S, kNT, kT>(acc, unit_scales, at, half, w_at, x_at, wk * kSteps + k, lane);
                }
                if (lane == 0) arrive_after(empty + stage, used);
                if (++stage == n_stages) {
                    stage = 0;
                    phase ^= 1;
                }
            }
            // Everybody is done with the ring, which may hold the sums now, and with the sums of the pass before.
            asm volatile("bar.sync 1, %0;" ::"n"(kFlatWarps * 32) : "memory");
#pragma unroll
            for (int t = 0; t < kT; ++t)
                if (t * kWM + wm < n_here)
#pragma unroll
                    for (int n = 0; n < S::kN8; ++n)
                        asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(sums + (((wk * deal.pass_tiles + t * kWM + wm) * S::kN8 + n) * 32 + lane) * 16), "f"(acc[t][n][0]), "f"(acc[t][n][1]), "f"(acc[t][n][2]), "f"(acc[t][n][3]) : "memory");
            asm volatile("bar.sync 1, %0;" ::"n"(kFlatWarps * 32) : "memory");
        }
        auto add = [&](float (&sum)[4], uint32_t from) {
            const uint4 v = shared_load4(from);
            sum[0] += __uint_as_float(v.x); sum[1] += __uint_as_float(v.y); sum[2] += __uint_as_float(v.z); sum[3] += __uint_as_float(v.w);
        };
        auto sum_of = [&](int fragment, float (&sum)[4]) {
            sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
#pragma unroll
            for (int k = 0; k < S::kWK; ++k) add(sum, sums + ((k * deal.pass_tiles * S::kN8 + fragment) * 32 + lane) * 16);
        };
        if (kPair == 2 && is_real) {
#pragma unroll 1
            for (int f = 2 * warp + 1 - rank; f < n_fragments; f += 2 * kFlatWarps) {
                float v[4];
                sum_of(f, v);
                send_sums(received + ((f >> 1) * 32 + lane) * 16, make_float4(v[0], v[1], v[2], v[3]), &has_received, rank ^ 1);
            }
        }
        if (pass == 0) barrier_wait(&are_factored, 0);
        if (kPair == 2 && is_real) barrier_wait(&has_received, 0);
        const int next = is_real ? kPair * kFlatWarps : n_fragments;
        if constexpr (kPlain) {
            // A warp's fragments have the same rows of x, their tiles are equally far apart.
            const int n0 = own % S::kN8 * 8 + 2 * q;
            const float by[2] = {is_real ? deal.scale * factors[n0] : 0.0f, is_real ? deal.scale * factors[n0 + 1] : 0.0f};
            const bool is_row[2] = {n0 < n_rows, n0 + 1 < n_rows};
            int tile = first + own / S::kN8;
#pragma unroll 1
            for (int f = own; f < n_fragments; f += next, tile += kPair * kFlatWarps / S::kN8) {
                float v[4];
                sum_of(f, v);
                if constexpr (kPair == 2) add(v, received + ((f >> 1) * 32 + lane) * 16);
                if constexpr (kGated) {
                    end_plain_gated(a, by, is_row, a.w[0].first_column + tile * 8 + r, n0, v);
                } else {
                    if (f != own) ask_beside(tile, n0 - 2 * q, old, gain);
                    end_plain(a, by, is_row, a.w[0].first_column + tile * 16 + r, tile, n0, r == 0 && n_rows > 0, v, old, gain);
                }
            }
        }
#pragma unroll 1
        for (int f = own; !kPlain && f < n_fragments; f += next) {
            float v[4];
            sum_of(f, v);
            if constexpr (kPair == 2) add(v, received + ((f >> 1) * 32 + lane) * 16);
            const int tile = first + f / S::kN8, n8 = f % S::kN8 * 8;
            if constexpr (kHeads) {
                const int i = weight_of(tile), row = row_of(tile, i);
                begin_head(a, a.w[i], packets, head_of(tile), tile, row + r, n8 + 2 * q, lane, factors, now, is_real, v);
                if (is_real) shared_store4(ring + (f * 32 + lane) * 16, make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3])));
            } else {
                if (f != own) ask_beside(tile, n8, old, gain);
                finish(tile, n8, v, old, gain);
            }
        }
        if constexpr (kHeads) {
#pragma unroll 1
            for (int f = own; f < n_fragments; f += next) {
                const int tile = first + f / S::kN8;
                if (f != own) turned = head_turn(a.heads, rows, head_gains(a.heads, head_of(tile), tile, lane));
                const uint4 u = shared_load4(ring + (f * 32 + lane) * 16);
                float v[4] = {__uint_as_float(u.x), __uint_as_float(u.y), __uint_as_float(u.z), __uint_as_float(u.w)};
                end_head<kSplit == kTileHalfHeads>(a, packets, rows, turned, head_of(tile), tile, f % S::kN8 * 8, lane, n_rows, now, is_real, v);
            }
        }
        if (is_real && pass + 1 < n_passes) {
            fence_async_proxy();
            __syncwarp();
            if (lane == 0) barrier_arrive(&is_summed);
        }
    }
    if (kHeads && threadIdx.x == 0) packets.numbers[blockIdx.x] = now;
#endif
}

}  // namespace pk
