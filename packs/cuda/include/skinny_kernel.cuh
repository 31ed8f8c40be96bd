// The skinny product's kernel (src/matmul/skinny.cu launches it).
//
// Weights stand on the M side of wgmma (A), rows of x on the N side (B, shared memory). A block takes tiles of kWg x kT x 64
// rows of W; the work of all tiles, cut along K into units, is dealt out evenly (stream-K, Osama et al. 2023): every block
// gets one run of units; the blocks of a shared tile deal its sums among themselves. One warp copies weights into a ring (BF16,
// FP8, F16: boxes of 64 rows x 128 bytes; block formats: whole units), one copies boxes of 64 of K of x, two more put those in
// the order in which a lane holds its weights (BF16 needs none); warpgroups multiply: BF16 from shared memory, everything else
// decoded to bf16 in registers, half a unit while the half before is multiplied. Weights are asked for before the kernels ahead
// are done (programmatic dependent launch). FP8 blocks' scales multiply the accumulators, other scales the weights. With an
// activation block row 0 of a warpgroup is gate, 1 is up (kT = 2).
#pragma once
#include "skinny_shape.cuh"

namespace pk {
namespace {

template <int kFormat, int kNT, int kWg, int kT>
__global__ void __launch_bounds__(kWg * 128 + 128, 1) skinny_kernel(const __grid_constant__ Maps maps, const __grid_constant__ SkinnyArguments a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using S = Shape<kFormat, kNT, kWg, kT>;
    constexpr bool kBlock = is_block_format(kFormat), kIsFp8 = !kBlock && Rows<kFormat>::kIsFp8;
    constexpr int kConsumers = kWg * 128, kTile64 = StageOf<kFormat>::kTile64;
    extern __shared__ uint8_t raw[];
    __shared__ uint64_t w_full[S::kWStages], w_empty[S::kWStages], x_full[S::kXStages], x_empty[S::kXStages], x_raw[S::kXStages], is_told;
    __shared__ int told[2];  // rows of x, number of the launch
    const uint32_t base = (shared_address(raw) + 1023) & ~1023u;
    const uint32_t x_ring = base, w_ring = base + S::kXStages * S::kXBytes;
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::kWStages; ++i) {
            barrier_init(w_full + i, 1);
            barrier_init(w_empty + i, 4 * kWg);
        }
        for (int i = 0; i < S::kXStages; ++i) {
            barrier_init(x_raw + i, 1);
            barrier_init(x_full + i, 1);
            barrier_init(x_empty + i, 4 * kWg);
        }
        barrier_init(&is_told, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    release_dependents();
    constexpr bool gated = kT == 2;  // the launch sees to it
    const int n_blocks = gridDim.x, me = blockIdx.x;
    const uint32_t total = a.n_tiles * a.n_units, n_work = min(static_cast<uint32_t>(n_blocks), total);  // units, blocks that have some
    auto first_of = [&](int block) { return static_cast<int>(block < n_work ? total * block / n_work : total); };
    const int begin = first_of(me), end = first_of(me + 1);
    // Launches for some row counts only read how many there are before they begin; others when they store.
    const bool may_be_idle = a.min_rows > 0 || a.first_row > 0;
    // Blocks tell each other by the number of the launch, which each counts for itself; every launch has the same blocks.
    int *epoch = a.flags + me, *part_flags = a.flags + 2 * kMaxBlocks;  // of the first part and of the last
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    auto weight_of = [&](int tile) { return gated ? 0 : a.n_w > 2 && tile >= a.w[2].first_tile ? 2 : a.n_w > 1 && tile >= a.w[1].first_tile ? 1 : 0; };
    // First row of block row t of warpgroup g.
    auto row_of = [&](int tile, int i, int g, int t) { return gated ? tile * 64 * kWg + g * 64 : (tile - a.w[i].first_tile) * S::kM + (g * kT + t) * 64; };

    if (warp >= 4 * kWg) {
        fewer_registers<56>();
        if (warp == 4 * kWg) {
            int stage = 0, landing = 0;  // landing: the first stage that is still under way
            uint32_t phase = 0, landing_phase = 0;
            int tile = begin / a.n_units, u = begin - tile * a.n_units, at = begin;
            auto copy_unit = [&] {
                const int i = weight_of(tile);
                if (at >= begin + S::kUnderWay) {
                    barrier_wait(w_full + landing, landing_phase);
                    if (++landing == S::kWStages) {
                        landing = 0;
                        landing_phase ^= 1;
                    }
                }
                barrier_wait(w_empty + stage, phase ^ 1);
                if (lane == 0) barrier_expect(w_full + stage, S::kWBytes);
                __syncwarp();
                const uint32_t to = w_ring + stage * S::kWPitch;
                if constexpr (kBlock) {
                    if (lane < 4 * kWg * kT) {
                        const int q = lane >> 2, t = q % kT;
                        const SkinnyWeight &w = a.w[gated ? t : i];
                        const int tile16 = min(row_of(tile, i, q / kT, t) / 16 + (lane & 3), w.n_tiles16 - 1);
                        copy_bytes_once(to + lane * Unit<kFormat>::kBytes, w.data + (static_cast<int64_t>(tile16) * a.n_units + u) * Unit<kFormat>::kBytes, Unit<kFormat>::kBytes, w_full + stage);
                    }
                } else if (lane < kWg * kT) {
                    const int t = lane % kT;
                    copy_box_once(to + lane * 8192, maps.w + (gated ? t : i), u * StageOf<kFormat>::kU, row_of(tile, i, lane / kT, t), w_full + stage);
                }
                if (++u == a.n_units) {
                    u = 0;
                    ++tile;
                }
                if (++stage == S::kWStages) {
                    stage = 0;
                    phase ^= 1;
                }
            };
            // Weights do not depend on the kernels before: the ring is filled while those still run, unless this launch may be idle.
            if (!may_be_idle)
                for (; at < end && at < begin + S::kWStages; ++at) copy_unit();
            wait_dependence();
            if (may_be_idle && rows_here<kNT>(a) <= 0) return;
            for (; at < end; ++at) copy_unit();
            return;
        }
        const int n_chunks = (end - begin) * S::kChunks, first_chunk = begin % a.n_units * S::kChunks, per_tile = a.n_units * S::kChunks;
        constexpr int kImage = StageOf<kFormat>::kImage, kTurn = kImage == 2 ? 2 : 1;
        wait_dependence();
        if (may_be_idle && rows_here<kNT>(a) <= 0) return;
        if (warp == 4 * kWg + 1) {
            if (lane != 0) return;
            int stage = 0;
            uint32_t phase = 0;
            for (int chunk = 0, block = first_chunk; chunk < n_chunks; ++chunk) {
                // Once the first copies are on their way: what the others need at the end.
                if (chunk == min(S::kXStages, n_chunks) - 1) {
                    told[0] = rows_here<kNT>(a);
                    told[1] = __ldcg(epoch) + 1;
                    barrier_arrive(&is_told);
                }
                barrier_wait(x_empty + stage, phase ^ 1);
                uint64_t *full = kImage == 0 ? x_full + stage : x_raw + stage;
                barrier_expect(full, S::kXBytes);
                copy_box_at(x_ring + stage * S::kXBytes, &maps.x, block * 64, 0, full);
                if (++block == per_tile) block = 0;
                if (++stage == S::kXStages) {
                    stage = 0;
                    phase ^= 1;
                }
            }
        } else if constexpr (kImage != 0) {
            // Two warps take turns; a stage is always the same warp's, which so waits for each of its phases.
            const int mine = warp - 4 * kWg - 2;
            int stage = 0;
            uint32_t phase = 0;
            for (int chunk = 0; chunk < n_chunks; chunk += kTurn) {
                int after = stage + kTurn;
                if (((chunk / kTurn) & 1) == mine) {
                    const uint32_t at = x_ring + stage * S::kXBytes;
                    barrier_wait(x_raw + stage, phase);
                    if constexpr (kTurn == 2) barrier_wait(x_raw + stage + 1, phase);
                    order_x<kImage, kNT>(at, at + S::kXBytes, lane);
                    fence_async_proxy();
                    __syncwarp();
                    if (lane < kTurn) barrier_arrive(x_full + stage + lane);
                }
                if (after >= S::kXStages) {
                    after = 0;
                    phase ^= 1;
                }
                stage = after;
            }
        }
        return;
    }
    more_registers<224>();
    // The tiles that other blocks share (the first, the last): the first of those blocks, how many.
    int shared_tile[2], owner[2], n_parts[2] = {0, 0};
#pragma unroll
    for (int which = 0; which < 2; ++which) {
        const int tile = (which == 0 ? begin : end - 1) / a.n_units, first = tile * a.n_units, last = first + a.n_units;
        shared_tile[which] = tile;
        owner[which] = 0;
        if (begin >= end || (begin <= first && end >= last) || (which == 1 && tile == begin / a.n_units)) continue;
        owner[which] = static_cast<int>(static_cast<uint32_t>(first) * n_work / total);
        while (first_of(owner[which] + 1) <= first) ++owner[which];
        while (first_of(owner[which]) > first) --owner[which];
        n_parts[which] = 1;
        while (owner[which] + n_parts[which] < n_work && first_of(owner[which] + n_parts[which]) < last) ++n_parts[which];
    }
    wait_dependence();
    if (may_be_idle && rows_here<kNT>(a) <= 0) return;
    int n_rows = 0, now = 0;
    auto ask_told = [&] {
        barrier_wait(&is_told, 0);
        n_rows = told[0];
        now = told[1];
    };
    const int g = warp >> 2, in = warp & 3;
    const uint32_t nothing = gridDim.y - 1;  // zero, which the compiler does not know
    const Opaque constants = {0x43004300u + nothing, 0xc300c300u + nothing, 0x4b000000u + nothing, 0x00800080u + nothing};
    float *staging = reinterpret_cast<float *>(raw + (base - shared_address(raw)) + S::kXStages * S::kXBytes + S::kWStages * S::kWPitch) + warp * kT * 16 * kPitch;
    int w_stage = 0, x_stage = 0, x_held = -1, w_held = -1;
    uint32_t w_phase = 0, x_phase = 0;
    auto release = [&](uint64_t *barrier) {
        __syncwarp();
        if (lane == 0) barrier_arrive(barrier);
    };
    // What is added to a piece, asked for ahead of its sums.
    auto load_old = [&](int tile, int g, int in, int chunk, float(&old)[8]) {
        const SkinnyWeight &w = a.w[weight_of(tile)];
        const int row = row_of(tile, weight_of(tile), g, 0) + in * 16 + (lane & 15);
#pragma unroll
        for (int r = 0; r < 8; ++r) {
            const int n = chunk * 16 + (lane >> 4) + 2 * r;
            const int64_t at = n * a.add_stride + w.first_column + row;
            old[r] = 0.0f;
            if (a.add != nullptr && n < n_rows && row < w.rows) old[r] = a.add_format == PK_F32 ? static_cast<const float *>(a.add)[at] : __bfloat162float(static_cast<const bf16 *>(a.add)[at]);
        }
    };
    // Stores 16 rows of every block row times 16 rows of x: the sums v of warp `in` of warpgroup `g`, through shared memory, so that
    // lanes store neighbouring columns.
    auto write_piece = [&](int tile, int g, int in, int chunk, const float(&v)[kT][8], const float(&old)[8]) {
        const int i = weight_of(tile);
        __syncwarp();
#pragma unroll
        for (int t = 0; t < kT; ++t)
#pragma unroll
            for (int e = 0; e < 8; ++e) staging[t * 16 * kPitch + (8 * (e >> 2) + 2 * (lane & 3) + (e & 1)) * kPitch + (lane >> 2) + 8 * ((e >> 1) & 1)] = v[t][e];
        __syncwarp();
        const int n0 = chunk * 16 + (lane >> 4);
        const SkinnyWeight &w = a.w[i];
        const int row = row_of(tile, i, g, 0) + in * 16 + (lane & 15);
        if (row >= w.rows) return;
        const float f0 = w.scale * (w.row_scale ? w.row_scale[row] : 1.0f), b0 = w.bias ? w.bias[row] : 0.0f;
        const float *from = staging + (lane >> 4) * kPitch + (lane & 15);
        const int64_t column = w.first_column + row;
        if (!gated && a.act == PK_ACT_NONE) {
#pragma unroll
            for (int r = 0; r < 8; ++r) {
                const int n = n0 + 2 * r;
                float out = (from[2 * r * kPitch] * f0 + b0) * a.scale;
                if (a.softcap > 0.0f) out = a.softcap * quick_tanh(out / a.softcap);
                out += old[r];
                if (n >= n_rows) continue;
                if (a.y_format == PK_F32) static_cast<float *>(a.y)[n * a.y_stride + column] = out;
                else static_cast<bf16 *>(a.y)[n * a.y_stride + column] = __float2bfloat16(out);
            }
            return;
        }
        const float f1 = gated ? a.w[1].scale * (a.w[1].row_scale ? a.w[1].row_scale[row] : 1.0f) : 0.0f, b1 = gated && a.w[1].bias ? a.w[1].bias[row] : 0.0f;
        const float *twin = from + (kT - 1) * 16 * kPitch;
        if (gated && a.act == PK_ACT_SILU && a.softcap <= 0.0f && a.add == nullptr && a.y_format == PK_BF16) {
#pragma unroll
            for (int r = 0; r < 8; ++r) {
                const float gate = from[2 * r * kPitch] * f0 + b0, up = twin[2 * r * kPitch] * f1 + b1;
                if (n0 + 2 * r < n_rows) static_cast<bf16 *>(a.y)[(n0 + 2 * r) * a.y_stride + column] = __float2bfloat16(__fdividef(gate, 1.0f + __expf(-gate)) * up * a.scale);
            }
            return;
        }
#pragma unroll 1
        for (int r = 0; r < 8 && n0 + 2 * r < n_rows; ++r) {
            const int n = n0 + 2 * r;
            const float more = a.add != nullptr ? load_as_f32(a.add, n * a.add_stride + column, a.add_format) : 0.0f;
            const float own = from[2 * r * kPitch] * f0 + b0;
            float out = activate(gated ? own : more, a.act) * (gated ? twin[2 * r * kPitch] * f1 + b1 : own) * a.scale;
            if (a.softcap > 0.0f) out = a.softcap * quick_tanh(out / a.softcap);
            store_from_f32(a.y, n * a.y_stride + column, a.y_format, gated ? out + more : out);
        }
    };
    float acc[kT][kNT / 2];
    auto hold = [&] {
#pragma unroll
        for (int t = 0; t < kT; ++t)
#pragma unroll
            for (int j = 0; j < kNT / 2; ++j) asm volatile("" : "+f"(acc[t][j])::"memory");
    };
    for (int at = begin; at < end;) {
        const int tile = at / a.n_units, u0 = at - tile * a.n_units, u1 = min(a.n_units, u0 + (end - at)), i = weight_of(tile);
        float unit_scales[kT];  // of the FP8 blocks that the accumulators are in
#pragma unroll
        for (int t = 0; t < kT; ++t) {
            unit_scales[t] = 1.0f;
#pragma unroll
            for (int j = 0; j < kNT / 2; ++j) acc[t][j] = 0.0f;
        }
        for (int u = u0; u < u1; ++u) {
            float next_scales[kT];
            if constexpr (kIsFp8) {
#pragma unroll
                for (int t = 0; t < kT; ++t) {
                    const SkinnyWeight &w = a.w[gated ? t : i];
                    next_scales[t] = w.block_scale ? __ldg(w.block_scale + (min(row_of(tile, i, g, t), w.rows - 1) >> 7) * w.block_stride + u) : 1.0f;
                }
            }
            barrier_wait(w_full + w_stage, w_phase);
            const uint32_t w_at = w_ring + w_stage * S::kWPitch + g * kT * kTile64;
            if constexpr (kFormat == PK_BF16) {
                barrier_wait(x_full + x_stage, x_phase);
                const uint32_t x_at = x_ring + x_stage * S::kXBytes;
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < 4; ++k)
#pragma unroll
                    for (int t = 0; t < kT; ++t) Wgmma<kNT>::shared(acc[t], matrix_descriptor(w_at + t * 8192 + 32 * k), matrix_descriptor(x_at + 32 * k), 1);
                wgmma_commit();
                wgmma_wait<1>();
                if (w_held >= 0) {
                    release(w_empty + w_held);
                    release(x_empty + x_held);
                }
                w_held = w_stage;
                x_held = x_stage;
                if (++x_stage == S::kXStages) {
                    x_stage = 0;
                    x_phase ^= 1;
                }
            } else {
                // What a group of kSteps x 32 of K multiplies is decoded as a whole, while the group before is multiplied. At least two
                // groups a unit: registers that a product under way reads must not be written before it is done.
                constexpr int kSteps = stage_steps<S, kNT, kT>(), kHere = kSteps > 1 ? kSteps / 2 : 1, kFine = kFormat == PK_F16 ? 2 : 1;
                static_assert(kSteps <= S::kChunks && (kSteps == 1 || kSteps % 2 == 0));
                Part<kFormat, kBlock> part[kT];
#pragma unroll
                for (int t = 0; t < kT; ++t) part[t].begin(w_at + t * kTile64, in, lane);
#pragma unroll
                for (int first = 0; first < 2 * S::kChunks; first += kSteps) {
                    uint32_t lo[kSteps][kT][kFine][4], hi[kSteps][kT][kFine][4];
#pragma unroll
                    for (int s = 0; s < kSteps; ++s)
#pragma unroll
                        for (int t = 0; t < kT; ++t) {
                            if ((first + s) % 2 == 0) part[t].chunk(w_at + t * kTile64, in, lane, (first + s) / 2, constants);
                            if constexpr (kBlock) part[t].operands(first + s, constants, lo[s][t][0], hi[s][t][0]);
                            else part[t].template operands<0>(first + s, lo[s][t][0], hi[s][t][0]);
                            if constexpr (kFine == 2) part[t].template operands<1>(first + s, lo[s][t][1], hi[s][t][1]);
                        }
                    if constexpr (kIsFp8) {
                        if (first == 0) {
                            wgmma_wait<0>();
                            hold();
#pragma unroll
                            for (int t = 0; t < kT; ++t) {
                                if (next_scales[t] == 0.0f) next_scales[t] = 1e-30f;
                                const float f = __fdividef(unit_scales[t], next_scales[t]);
                                unit_scales[t] = next_scales[t];
#pragma unroll
                                for (int j = 0; j < kNT / 2; ++j) acc[t][j] *= f;
                            }
                        }
                    }
                    if (first % 2 == 0) {
#pragma unroll
                        for (int d = 0; d < kHere; ++d) barrier_wait(x_full + x_stage + d, x_phase);
                    }
                    // The low words of descriptors: only they change.
                    const uint32_t x_low = (((x_ring + x_stage * S::kXBytes) & 0x3ffff) >> 4) | 0x10000;
                    auto x_at = [&](int s, int half) { return (uint64_t{0x40000040} << 32) | (x_low + s / 2 * (S::kXBytes / 16) + 4 * ((first + s) & 1) + 2 * half); };
                    wgmma_fence();
#pragma unroll
                    for (int s = 0; s < kSteps; ++s)
#pragma unroll
                        for (int t = 0; t < kT; ++t)
#pragma unroll
                            for (int f = 0; f < kFine; ++f) {
                                uint32_t(&l)[4] = lo[s][t][f];
                                uint32_t(&h)[4] = hi[s][t][f];
                                Wgmma<kNT>::registers(acc[t], l[0], h[0], l[1], h[1], x_at(s, 0));
                                Wgmma<kNT>::registers(acc[t], l[2], h[2], l[3], h[3], x_at(s, 1));
                            }
                    wgmma_commit();
                    wgmma_wait<1>();
                    if (first % 2 == 0 && x_held >= 0) {
#pragma unroll
                        for (int d = 0; d < kHere; ++d) release(x_empty + x_held + d);
                    }
                    if (kSteps > 1 || first % 2 == 1) {
                        x_held = x_stage;
                        x_stage += kHere;
                        if (x_stage == S::kXStages) {
                            x_stage = 0;
                            x_phase ^= 1;
                        }
                    }
                }
                release(w_empty + w_stage);
            }
            if (++w_stage == S::kWStages) {
                w_stage = 0;
                w_phase ^= 1;
            }
        }
        wgmma_wait<0>();
        hold();
        if (x_held >= 0) {
            constexpr int kSteps = stage_steps<S, kNT, kT>(), kHere = kFormat != PK_BF16 && kSteps > 1 ? kSteps / 2 : 1;
#pragma unroll
            for (int d = 0; d < kHere; ++d) release(x_empty + x_held + d);
        }
        x_held = -1;
        if (kFormat == PK_BF16 && w_held >= 0) {
            release(w_empty + w_held);
            w_held = -1;
        }
        at += u1 - u0;
        ask_told();
        if constexpr (kIsFp8) {
#pragma unroll
            for (int t = 0; t < kT; ++t)
#pragma unroll
                for (int j = 0; j < kNT / 2; ++j) acc[t][j] *= unit_scales[t];
        }
        if (u0 > 0 || u1 < a.n_units) {
            // A part of a tile: laid down for whoever adds it up.
            float4 *mine = reinterpret_cast<float4 *>(a.partial + (2 * me + (u0 == 0)) * static_cast<int64_t>(S::kM * kNT)) + threadIdx.x;
#pragma unroll
            for (int t = 0; t < kT; ++t)
#pragma unroll
                for (int j = 0; j < kNT / 8; ++j) __stcg(mine + (t * (kNT / 8) + j) * kConsumers, make_float4(acc[t][4 * j], acc[t][4 * j + 1], acc[t][4 * j + 2], acc[t][4 * j + 3]));
            consumers_sync<kConsumers>();
            if (threadIdx.x == 0) store_release(part_flags + 2 * me + (u0 == 0), now);
            continue;
        }
        // Sixteen rows of x at a time through shared memory, so that lanes store neighbouring columns and one copy of the code serves all.
#pragma unroll 1
        for (int chunk = 0; chunk < kNT / 16; ++chunk) {
            if (chunk * 16 >= n_rows) break;
            float v[kT][8], old[8];
            if constexpr (!gated) load_old(tile, g, in, chunk, old);
#pragma unroll
            for (int c = 0; c < kNT / 16; ++c)
                if (c == chunk)
#pragma unroll
                    for (int t = 0; t < kT; ++t)
#pragma unroll
                        for (int e = 0; e < 8; ++e) v[t][e] = acc[t][8 * c + e];
            write_piece(tile, g, in, chunk, v, old);
        }
    }
    // The blocks of a shared tile deal its pieces of 16 rows of W (or of both) and 16 of x among their warps, and add the parts in order.
    for (int which = 0; which < 2; ++which)
        for (int i = threadIdx.x; i < n_parts[which]; i += kConsumers)
            while (load_acquire(part_flags + 2 * (owner[which] + i) + (i == 0)) != now) {}
    if (n_parts[0] + n_parts[1] > 0) consumers_sync<kConsumers>();
#pragma unroll 1
    for (int which = 0; which < 2; ++which) {
        constexpr int kPieces = kWg * 4 * (kNT / 16);
        const int tile = shared_tile[which], parts = n_parts[which];
        if (parts == 0) continue;
        for (int piece = warp + (me - owner[which]) * 4 * kWg; piece < kPieces; piece += parts * 4 * kWg) {
            const int pw = piece % (4 * kWg), chunk = piece / (4 * kWg);
            if (chunk * 16 >= n_rows) break;
            float v[kT][8] = {}, old[8];
            if constexpr (!gated) load_old(tile, pw >> 2, pw & 3, chunk, old);
#pragma unroll 4
            for (int part = 0; part < parts; ++part) {
                const float4 *from = reinterpret_cast<const float4 *>(a.partial + (2 * (owner[which] + part) + (part == 0)) * static_cast<int64_t>(S::kM * kNT)) + pw * 32 + lane;
#pragma unroll
                for (int t = 0; t < kT; ++t)
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        const float4 p = __ldcg(from + (t * (kNT / 8) + 2 * chunk + j) * kConsumers);
                        v[t][4 * j] += p.x; v[t][4 * j + 1] += p.y; v[t][4 * j + 2] += p.z; v[t][4 * j + 3] += p.w;
                    }
            }
            write_piece(tile, pw >> 2, pw & 3, chunk, v, old);
        }
    }
    // Blocks without work count, too.
    if (threadIdx.x == 0) *epoch = begin < end ? now : __ldcg(epoch) + 1;
#endif
}

}  // namespace
}  // namespace pk
