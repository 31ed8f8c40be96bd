// The persistent decode kernel: all layers of a step of 1 to kRows rows in one launch.
//
// One block a multiprocessor. Four warps of each block stream this block's share of every weight of every phase into rings in
// shared memory (one ring a multiplying warp), in order and without regard to what blocks wait for: weights depend on
// nothing, so the memory stays busy meanwhile. Sixteen warps take chunks of 16 rows x 128 or 256
// elements of K in turn, add them up per tile of 16 rows, join in shared memory and write. Blocks hand activations on as
// packets (phase.h): there is no barrier of the grid. A buffer of packets is written again four phases later at the earliest:
// every phase reads what the one before it wrote, so nobody can be that far ahead of a reader. Weights: BF16, FP8 E4M3 (128 x 128 scales), Q8_0, Q4_K, Q6_K. One row count bound a
// translation unit (PK_PERSIST_ROWS). Assumes that all blocks are resident: launched cooperatively.
#include "../../include/persist/phase.h"
#ifdef PK_WGMMA
#include "../../include/persist/attend.cuh"
#include "../../include/persist/multiply.cuh"
#include "../../include/persist/stage.cuh"

namespace pk::persist {
namespace {

constexpr int kMaxSlots = 8;

struct Shared {
    uint64_t full[kWarps][kMaxSlots], empty[kWarps][kMaxSlots];
    float rms[kWarps];
    RowFacts rows[kMaxRows];
    AttendItem item;
    int gather[kMaxRows];
    int n_tokens, n_samples;
    uint32_t base;
};

struct Range {
    int begin, end;
};
// The tiles of this block: the first `more` blocks of a phase have one more than the others.
__device__ __forceinline__ Range range_of(const Phase &p) {
    const int n = gridDim.x, at = blockIdx.x + p.shift, b = at < n ? at : at - n, each = p.each, more = p.more;
    const int begin = b * each + min(b, more);
    return {begin, begin + each + (b < more)};
}
// The tiles of weight i that belong to this block, counted within the weight.
__device__ __forceinline__ Range tiles_of(const Range &all, const Weight &w) {
    const int first = w.first_tile;
    return {max(all.begin, first) - first, min(all.end, first + w.n_tiles) - first};
}

constexpr int kPhaseVectors = (sizeof(Phase) + 15) / 16, kPhaseStride = (sizeof(Phase) + 127) / 128 * 128;
static_assert(sizeof(Phase) % 16 == 0 && kPhaseVectors <= 64);

// The next phase's description, asked early and put down late.
struct Coming {
    uint4 v[2];
    __device__ void ask(const Phase *from, int lane) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (lane + 32 * i < kPhaseVectors) v[i] = __ldg(reinterpret_cast<const uint4 *>(from) + lane + 32 * i);
    }
    __device__ void put(uint8_t *to, int lane) const {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (lane + 32 * i < kPhaseVectors) reinterpret_cast<uint4 *>(to)[lane + 32 * i] = v[i];
    }
};

struct Slot {
    int at = 0;
    uint32_t parity = 0;
    __device__ void advance(int n) {
        if (++at == n) {
            at = 0;
            parity ^= 1;
        }
    }
};

// By one thread: a chunk of a block format, which is one run of bytes.
__device__ __forceinline__ void send_block(const Weight &w, int tile, int chunk, uint32_t to, uint32_t barrier, uint64_t policy) {
    const int bytes = block_chunk_bytes(w.format);
    barrier_expect(barrier, bytes);
    copy_bulk(to, w.data + (static_cast<int64_t>(tile) * w.n_chunks + chunk) * bytes, bytes, barrier, policy);
}
// By a warp: 16 pieces of rows, too short for bulk copies, which cost 50 cycles each.
__device__ __forceinline__ void send_rows(const Weight &w, int tile, int chunk, uint32_t to, uint32_t barrier, uint64_t policy, int lane) {
    const uint8_t *from = w.data + (static_cast<int64_t>(tile) * 16 + (lane >> 4)) * w.row_bytes + chunk * 256 + (lane & 15) * 16;
#pragma unroll
    for (int i = 0; i < 8; ++i) copy16_once(to + row_piece(2 * i + (lane >> 4), lane & 15), from + 2 * i * w.row_bytes, policy);
    if (lane == 0 && w.block_scale != nullptr)
        copy16_once(to + kRowsScaleAt, w.block_scale + static_cast<int64_t>(tile >> 3) * w.scale_stride + ((2 * chunk) & ~3), policy);
    barrier_follow(barrier);
    __syncwarp();
    if (lane == 0) barrier_arrive(barrier);
}

// A producer warp fills kWarps / kProducers rings. Block formats: a lane a ring. Row-major ones: one ring after the other.
__device__ void produce(const Arguments &a, Shared &s, uint8_t *shared, const Layout &layout) {
    constexpr int kRings = kWarps / kProducers;
    const int lane = threadIdx.x & 31, first = (threadIdx.x >> 5) % kProducers * kRings;
    uint8_t *phases = shared + layout.phases + (threadIdx.x >> 5) % kProducers * 2 * kPhaseStride;
    const uint64_t policy = read_once_policy();
    const uint32_t rings = shared_address(shared), full = shared_address(s.full), empty = shared_address(s.empty);
    Slot slots[kRings];  // block formats: all lanes keep all
#pragma unroll
    for (int i = 0; i < kRings; ++i) slots[i].parity = 1;  // the first round finds empty slots
    Coming coming;
    coming.ask(a.phases, lane);
    coming.put(phases, lane);
    __syncwarp();
    for (int p = 0; p < a.n_phases; ++p) {
        const Phase &phase = *reinterpret_cast<const Phase *>(phases + (p & 1) * kPhaseStride);
        if (p + 1 < a.n_phases) coming.ask(a.phases + p + 1, lane);
        if (phase.kind == kMatmul) {
            const Range all = range_of(phase);
            const bool is_gated = phase.is_gated;
            for (int part = 0; part < phase.n_parts; ++part)
                for (int i = 0; i < (is_gated ? 1 : phase.n_w); ++i) {
                    const Range tiles = tiles_of(all, phase.w[i]);
                    const int chunks = phase.w[i].part_chunks, n = max(0, tiles.end - tiles.begin) * (is_gated ? 2 : 1) * chunks;
                    const bool by_rows = is_rows(phase.w[i].format);
                    for (int round = 0; round < n; round += kWarps) {
#pragma unroll
                        for (int k = 0; k < kRings; ++k) {
                            const int ring = first + k, j = round + ring;
                            if (j >= n) continue;
                            const uint32_t index = ring * kMaxSlots + slots[k].at, to = rings + (ring * a.n_slots + slots[k].at) * a.slot_bytes;
                            const int t = static_cast<uint32_t>(j) / static_cast<uint32_t>(chunks), chunk = j - t * chunks + part * chunks;
                            const Weight &w = phase.w[is_gated ? t & 1 : i];
                            const int tile = tiles.begin + (is_gated ? t >> 1 : t);
                            if (by_rows) {
                                barrier_wait(empty + 8 * index, slots[k].parity);
                                send_rows(w, tile, chunk, to, full + 8 * index, policy, lane);
                            } else if (lane == k) {
                                barrier_wait(empty + 8 * index, slots[k].parity);
                                send_block(w, tile, chunk, to, full + 8 * index, policy);
                            }
                            slots[k].advance(a.n_slots);
                        }
                    }
                }
        }
        __syncwarp();
        if (p + 1 < a.n_phases) coming.put(phases + ((p + 1) & 1) * kPhaseStride, lane);
        __syncwarp();
    }
    wait_async<0>();
}

// What a consumer warp carries from phase to phase.
struct Taker {
    const uint8_t *ring;
    uint32_t full, empty;
    int n_slots, slot_bytes;
    Slot slot;
    int flip = 0;  // which of the two halves of the partial sums
};

__device__ __forceinline__ float finish(const Weight &w, int row, float v) {
    v *= w.scale;
    if (w.row_scale != nullptr) v *= __ldg(w.row_scale + row);
    return w.bias != nullptr ? v + __ldg(w.bias + row) : v;
}
__device__ __forceinline__ float gate_of(float v, int32_t act) { return act == PK_ACT_SILU ? __fdividef(v, 1.0f + __expf(-v)) : activate(v, act); }

// Tiles of one weight (gate and up by turns) that are added up together.
struct Group {
    int first, n;       // among the weight's tiles of this block
    int chunks;         // of a tile, in this part of K
    int next;           // the next chunk of this warp, counted over all tiles
    int scale_at;       // -1: no scales of blocks; otherwise scales of a row of blocks before this part
    int x_row;
    const uint8_t *xs;
    float *sums;        // [tiles][warps][16 rows of x's rows]
};

// This warp's chunks of the group.
template <int kFormat, int kRows>
__device__ __forceinline__ void multiply(Group &g, Taker &taker) {
    const int lane = threadIdx.x & 31;
    Product<kFormat, kRows> product;
    float *to = g.sums + (threadIdx.x >> 5) * (16 * kRows);
#pragma unroll 1
    for (int t = g.first; t < g.first + g.n; ++t, to += kWarps * 16 * kRows) {
        product.clear();
        const int begin = t * g.chunks, end = begin + g.chunks;
#pragma unroll 1
        for (; g.next < end; g.next += kWarps) {
            const int chunk = g.next - begin;
            barrier_wait(taker.full + 8 * taker.slot.at, taker.slot.parity);
            product.add(taker.ring + taker.slot.at * taker.slot_bytes, g.xs, g.x_row, chunk, g.scale_at < 0 ? -1 : (g.scale_at + 2 * chunk) & 3, lane);
            __syncwarp();
            if (lane == 0) barrier_arrive(taker.empty + 8 * taker.slot.at);
            taker.slot.advance(taker.n_slots);
        }
        product.store(to, lane);
    }
}

// Adds up what the warps left of a group, and writes it when K is complete.
template <int kRows>
__device__ __forceinline__ void write_group(const Phase &phase, const Weight &w, const Group &g, int part, int first_row, float *kept, int n_rows, uint2 early, uint32_t base, int at) {
    constexpr int kTile = 16 * kRows;
    const int lane = threadIdx.x & 31, is_gated = phase.is_gated, n_outputs = (g.n >> is_gated) * kTile, rows = w.rows, first_column = w.first_column;
    const bool is_last = part + 1 == phase.n_parts;
    const Place y = phase.y, add = phase.add;
    const float scale = phase.scale, softcap = phase.softcap;
#pragma unroll 1
    for (int first = threadIdx.x & ~31; first < n_outputs; first += kConsumers) {
        const int o = first + lane, in = o % kTile, row = in / 16, column = first_row + o / kTile * 16 + o % 16;
        float v[2] = {0.0f, 0.0f};
        if (o < n_outputs) {
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                if (side > is_gated) break;
                const int tile = (o / kTile << is_gated) + side;
#pragma unroll
                for (int k = 0; k < kWarps; ++k) v[side] += g.sums[(tile * kWarps + k) * kTile + in];
                float *mine = kept + (g.first + tile) * kTile + in;
                if (part > 0) v[side] += *mine;
                if (!is_last) *mine = v[side];
            }
        }
        if (!is_last) continue;
        const bool is_valid = o < n_outputs && row < n_rows && column < rows;
        float out = 0.0f;
        if (is_valid) {
            out = finish(w, column, v[0]);
            if (is_gated) out = gate_of(out, phase.act) * finish(phase.w[1], column, v[1]);
            out *= scale;
            if (softcap > 0.0f) out = softcap * quick_tanh(__fdividef(out, softcap));
            if (add.packets) {
                const uint32_t epoch = base + add.source + 1;
                if (first >= kConsumers || early.y != epoch) early = await_packet(added_at(add, row * add.stride + first_column + column), epoch);
                out += add.format == PK_F32 ? __uint_as_float(early.x) : column & 1 ? high_f32(early.x) : low_f32(early.x);
            }
        }
        write_output(y, row * y.stride + first_column + column, out, is_valid, base + at + 1);
    }
}

template <int kRows>
__device__ __forceinline__ int rows_in(const Phase &p, const Shared &s) {
    return min(kRows, p.rows_symbol == PK_ROWS_T ? s.n_tokens : p.rows_symbol == PK_ROWS_S ? s.n_samples : static_cast<int>(p.rows_symbol));
}

template <int kRows>
__device__ __forceinline__ void matmul_phase(const Phase &phase, const Arguments &a, Shared &s, uint8_t *shared, const Layout &layout, Taker &taker, int at) {
    constexpr int kTile = 16 * kRows;
    const int n_rows = rows_in<kRows>(phase, s), warp = threadIdx.x >> 5, n_parts = phase.n_parts, is_gated = phase.is_gated;
    uint8_t *xs = shared + layout.x;
    const Range all = range_of(phase);
    if (all.end <= all.begin) return;
    const uint32_t base = s.base;
#pragma unroll 1
    for (int part = 0; part < n_parts; ++part) {
        if (part) join_consumers(kConsumers);
        if (phase.staging <= kStageFp8) {
            if (phase.norm) stage<kRows, false, true>(phase, a, at, xs, s.rms, s.gather, part, n_rows, base);
            else stage<kRows, false, false>(phase, a, at, xs, s.rms, s.gather, part, n_rows, base);
        } else {
            if (phase.norm) stage<kRows, true, true>(phase, a, at, xs, s.rms, s.gather, part, n_rows, base);
            else stage<kRows, true, false>(phase, a, at, xs, s.rms, s.gather, part, n_rows, base);
        }
        join_consumers(kConsumers);
        mark(a, at, 3);
        float *kept = reinterpret_cast<float *>(shared + layout.total);
#pragma unroll 1
        for (int i = 0; i < (is_gated ? 1 : phase.n_w); ++i) {
            const Weight &w = phase.w[i];
            const Range tiles = tiles_of(all, w);
            if (tiles.end <= tiles.begin) continue;
            const int n_tiles = (tiles.end - tiles.begin) << is_gated, format = w.format, most = a.part_bytes / (4 * kWarps * kTile) & ~1;
            Group g;
            g.chunks = w.part_chunks;
            g.next = warp;
            g.scale_at = w.block_scale != nullptr ? 2 * part * g.chunks : -1;
            g.x_row = x_row_bytes(phase.staging, phase.part_k);
            g.xs = xs;
#pragma unroll 1
            for (g.first = 0; g.first < n_tiles; g.first += most) {
                g.n = min(most, n_tiles - g.first);
                g.sums = reinterpret_cast<float *>(shared + layout.part + (taker.flip & 1) * a.part_bytes);
                taker.flip ^= 1;
                const int first_row = (tiles.begin + (g.first >> is_gated)) * 16;
                // What this thread's output is added to, asked early.
                uint2 early = {0, 0};
                if (phase.add.packets && part + 1 == n_parts) {
                    const int row = threadIdx.x % kTile / 16, column = first_row + threadIdx.x / kTile * 16 + threadIdx.x % 16;
                    if (threadIdx.x < (g.n >> is_gated) * kTile && row < n_rows && column < w.rows) early = load_packet(added_at(phase.add, row * phase.add.stride + w.first_column + column));
                }
                switch (format) {
                    case PK_BF16: multiply<PK_BF16, kRows>(g, taker); break;
                    case PK_FP8_E4M3: multiply<PK_FP8_E4M3, kRows>(g, taker); break;
                    case PK_Q8_0: multiply<PK_Q8_0, kRows>(g, taker); break;
                    case PK_Q4_K: multiply<PK_Q4_K, kRows>(g, taker); break;
                    default: multiply<PK_Q6_K, kRows>(g, taker); break;
                }
                mark(a, at, 4);
                join_consumers(kConsumers);
                mark(a, at, 5);
                write_group<kRows>(phase, w, g, part, first_row, kept, n_rows, early, base, at);
            }
            kept += n_tiles * kTile;
        }
    }
}

template <int kRows>
__device__ void consume(const Arguments &a, Shared &s, uint8_t *shared, const Layout &layout) {
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    uint8_t *phases = shared + layout.phases + 2 * kProducers * kPhaseStride;
    Taker taker;
    taker.n_slots = a.n_slots;
    taker.slot_bytes = a.slot_bytes;
    taker.ring = shared + warp * a.n_slots * a.slot_bytes;
    taker.full = shared_address(s.full[warp]);
    taker.empty = shared_address(s.empty[warp]);
    // The next phase's description is asked at the beginning of a phase and there at its end.
    auto ask = [&](int p) {
        if (warp == 0)
            for (int i = lane; i < kPhaseVectors; i += 32) copy16_async(shared_address(phases + (p & 1) * kPhaseStride) + 16 * i, reinterpret_cast<const uint4 *>(a.phases + p) + i, true);
        commit_async();
    };
    ask(0);
    wait_async<0>();
#pragma unroll 1
    for (int p = 0; p < a.n_phases; ++p) {
        join_consumers(kConsumers);
        mark(a, p, 0);
        const Phase &phase = *reinterpret_cast<const Phase *>(phases + (p & 1) * kPhaseStride);
        if (p + 1 < a.n_phases) ask(p + 1);
        if (phase.kind == kPublish) {
            publish(phase, rows_in<kRows>(phase, s), s.base + p + 1);
        } else if (phase.kind == kMatmul) {
            matmul_phase<kRows>(phase, a, s, shared, layout, taker, p);
        } else if (phase.attend.head_width == 128) {
            attend<128>(phase, a, s.rows, s.item, shared + layout.x, s.n_tokens, s.base, p);
        } else {
            attend<64>(phase, a, s.rows, s.item, shared + layout.x, s.n_tokens, s.base, p);
        }
        wait_async<0>();
        mark(a, p, 6);
    }
}

// What the step left for this launch.
template <int kRows>
__device__ __forceinline__ void read_step(const Arguments &a, Shared &s) {
    const int i = threadIdx.x - 32;
    if (i < 0 || i >= kRows) return;
    const int n_tokens = a.info->n_tokens, n_samples = a.info->n_samples;
    if (i == 0) {
        s.n_tokens = n_tokens;
        s.n_samples = n_samples;
        s.base = __ldcg(a.epochs);
    }
    if (i < n_tokens && a.row_position != nullptr)
        s.rows[i] = {a.row_position[i], a.row_slot[i], a.token_page[i], a.row_flags[i] & PK_ROW_DEAD};
    if (i < n_samples && a.sample_at != nullptr) s.gather[i] = a.sample_at[i];
}

template <int kRows>
__global__ void __launch_bounds__(kThreads, 1) persist_kernel(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ Shared s;
    const Layout layout = layout_of(a);
    if (threadIdx.x == 0) {
        for (int w = 0; w < kWarps; ++w)
            for (int i = 0; i < a.n_slots; ++i) {
                barrier_init(shared_address(&s.full[w][i]), 1);
                barrier_init(shared_address(&s.empty[w][i]), 1);
            }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    read_step<kRows>(a, s);
    __syncthreads();
    if (threadIdx.x >= kConsumers) {
        produce(a, s, shared, layout);
    } else {
        consume<kRows>(a, s, shared, layout);
    }
    __syncthreads();
    // The last block to end moves the epoch on: all others have read it.
    if (threadIdx.x == 0 && atomicAdd(a.epochs + 1, 1) == gridDim.x - 1) {
        a.epochs[0] = s.base + a.n_phases;
        a.epochs[1] = 0;
    }
}

}  // namespace

template <int kRows>
int32_t launch_rows(const Launch &l, const Arguments &a, int n_blocks) {
    const int bytes = layout_of(a).end;
    if (int32_t e = check(cudaFuncSetAttribute(persist_kernel<kRows>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "persist")) return e;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(n_blocks);
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = bytes;
    config.stream = l.stream;
    cudaLaunchAttribute attribute[1];
    attribute[0].id = cudaLaunchAttributeCooperative;
    attribute[0].val.cooperative = 1;
    config.attrs = attribute;
    config.numAttrs = 1;
    return check(cudaLaunchKernelEx(&config, persist_kernel<kRows>, a), "persist");
}

}  // namespace pk::persist
#else
namespace pk::persist {
template <int kRows>
int32_t launch_rows(const Launch &, const Arguments &, int) {
    return fail(PK_UNSUPPORTED, "persist: this architecture has no such kernel");
}
}  // namespace pk::persist
#endif

template int32_t pk::persist::launch_rows<PK_PERSIST_ROWS>(const pk::Launch &, const pk::persist::Arguments &, int);
