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
    int gather[kMaxRows];
    int n_tokens, n_samples;
    uint32_t base;
};

struct Range {
    int begin, end;
};
__device__ __forceinline__ Range range_of(const Phase &p) {
    const uint32_t n = gridDim.x, b = blockIdx.x + p.shift < n ? blockIdx.x + p.shift : blockIdx.x + p.shift - n;
    return {static_cast<int>(static_cast<uint32_t>(p.n_tiles * b) / n), static_cast<int>(static_cast<uint32_t>(p.n_tiles * (b + 1)) / n)};
}
// The tiles of weight i that belong to this block, counted within the weight.
__device__ __forceinline__ Range tiles_of(const Range &all, const Weight &w) {
    return {max(all.begin, w.first_tile) - w.first_tile, min(all.end, w.first_tile + w.n_tiles) - w.first_tile};
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
                    const int chunks = phase.w[i].n_chunks / phase.n_parts, n = max(0, tiles.end - tiles.begin) * (is_gated ? 2 : 1) * chunks;
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

// What a consumer warp carries from job to job.
struct Taker {
    const uint8_t *ring;
    uint32_t full, empty;
    int n_slots, slot_bytes;
    Slot slot;
    int probe = 0;
    int flip = 0;  // which of the two halves of the partial sums
};

__device__ __forceinline__ float finish(const Weight &w, int row, float v) {
    v *= w.scale;
    if (w.row_scale != nullptr) v *= __ldg(w.row_scale + row);
    return w.bias != nullptr ? v + __ldg(w.bias + row) : v;
}
struct Job {
    int weight, first_tile, n_tiles, sides, part;  // n_tiles counts both sides
    float *totals;                                 // of this job, when K comes in parts
};

__device__ __forceinline__ float gate_of(float v, int32_t act) { return act == PK_ACT_SILU ? __fdividef(v, 1.0f + __expf(-v)) : activate(v, act); }

// Outputs of a group of tiles. Output o of the group: row of x o / 16 % kRows, row o % 16 of tile o / (16 kRows).
template <int kRows>
struct Group {
    static constexpr int kTile = 16 * kRows;
    const Phase &phase;
    const Weight &w;
    const float *sums;     // [tiles][warps][kTile]
    float *kept;           // [tiles][kTile], of earlier parts of K
    int first_row, n_outputs, n_rows, is_gated, part;
    uint32_t base, at;

    __device__ int row_of(int o) const { return o % kTile / 16; }
    __device__ int column_of(int o) const { return first_row + o / kTile * 16 + o % 16; }
    __device__ bool is_last() const { return part + 1 == phase.n_parts; }
    __device__ bool is_output(int o) const { return is_last() && o < n_outputs && row_of(o) < n_rows && column_of(o) < w.rows; }
    __device__ float added(int o) const {
        return phase.add.packets && is_output(o) ? load_one(phase.add, row_of(o) * phase.add.stride + w.first_column + column_of(o), base + phase.add.source + 1) : 0.0f;
    }
    __device__ float total(int tile, int in) const {
        float v = 0.0f;
#pragma unroll
        for (int k = 0; k < kWarps; ++k) v += sums[(tile * kWarps + k) * kTile + in];
        if (part > 0) v += kept[tile * kTile + in];
        if (!is_last()) kept[tile * kTile + in] = v;
        return v;
    }
    // early: what this thread's first output is added to.
    __device__ __noinline__ void write(float early) const {
        const int lane = threadIdx.x & 31;
#pragma unroll 1
        for (int first = threadIdx.x & ~31; first < n_outputs; first += kConsumers) {
            const int o = first + lane, t = o / kTile, in = o % kTile;
            float v = 0.0f, up = 0.0f;
            if (o < n_outputs) {
                v = total(t << is_gated, in);
                if (is_gated) up = total(2 * t + 1, in);
            }
            if (!is_last()) continue;
            const bool is_valid = is_output(o);
            const int row = row_of(o), column = column_of(o);
            if (is_valid) {
                v = finish(w, column, v);
                if (is_gated) v = gate_of(v, phase.act) * finish(phase.w[1], column, up);
                v *= phase.scale;
                if (phase.softcap > 0.0f) v = phase.softcap * quick_tanh(__fdividef(v, phase.softcap));
                v += first < kConsumers ? early : added(o);
            }
            write_output(phase.y, row * phase.y.stride + w.first_column + column, v, is_valid, base + at + 1);
        }
    }
};

template <int kFormat, int kRows>
__device__ __forceinline__ void run_job(const Phase &phase, const Job &job, Taker &taker, const uint8_t *xs, float *parts, int part_floats, int n_rows, uint32_t base, int at) {
    constexpr int kTile = 16 * kRows;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, is_gated = job.sides - 1;
    const Weight &w = phase.w[job.weight];
    const int chunks = w.n_chunks / phase.n_parts, most = part_floats / (kWarps * kTile) & ~1;
    const int x_row = x_row_bytes(phase.staging, phase.k / phase.n_parts);
    const bool has_block_scale = w.block_scale != nullptr;
    Product<kFormat, kRows> product;
    int i = warp;
#pragma unroll 1
    for (int t0 = 0; t0 < job.n_tiles; t0 += most) {
        const int n = min(most, job.n_tiles - t0);
        float *mine = parts + (taker.flip & 1) * part_floats;
        const Group<kRows> group = {phase, w, mine, job.totals + t0 * kTile, (job.first_tile + (t0 >> is_gated)) * 16, (n >> is_gated) * kTile, n_rows, is_gated, job.part, base, static_cast<uint32_t>(at)};
        const float early = group.added(threadIdx.x);
#pragma unroll 1
        for (int t = 0; t < n; ++t) {
            product.clear();
#pragma unroll 1
            for (; i < (t0 + t + 1) * chunks; i += kWarps) {
                const int chunk = i - (t0 + t) * chunks;
                barrier_wait(taker.full + 8 * taker.slot.at, taker.slot.parity);
                const int scale_at = has_block_scale ? (2 * (chunk + job.part * chunks)) & 3 : -1;
                if (!(taker.probe & 2)) product.add(taker.ring + taker.slot.at * taker.slot_bytes, xs, x_row, chunk, scale_at, lane);
                __syncwarp();
                if (lane == 0) barrier_arrive(taker.empty + 8 * taker.slot.at);
                taker.slot.advance(taker.n_slots);
            }
            product.store(mine + (t * kWarps + warp) * kTile, lane);
        }
        join_consumers(kConsumers);
        ++taker.flip;
        group.write(early);
    }
}

template <int kRows>
__device__ __forceinline__ int rows_in(const Phase &p, const Shared &s) {
    return min(kRows, p.rows_symbol == PK_ROWS_T ? s.n_tokens : p.rows_symbol == PK_ROWS_S ? s.n_samples : static_cast<int>(p.rows_symbol));
}

template <int kRows>
__device__ void matmul_phase(const Phase &phase, const Arguments &a, Shared &s, uint8_t *shared, const Layout &layout, Taker &taker, int at) {
    const int n_rows = rows_in<kRows>(phase, s);
    uint8_t *xs = shared + layout.x;
    float *parts = reinterpret_cast<float *>(shared + layout.part), *totals = reinterpret_cast<float *>(shared + layout.total);
    const Range all = range_of(phase);
    if (all.end <= all.begin) return;
    const uint32_t base = s.base;
    for (int part = 0; part < phase.n_parts; ++part) {
        if (part) join_consumers(kConsumers);
        if (phase.staging <= kStageFp8) {
            if (phase.norm) stage<kRows, false, true>(phase, xs, s.rms, s.gather, part, n_rows, base);
            else stage<kRows, false, false>(phase, xs, s.rms, s.gather, part, n_rows, base);
        } else {
            if (phase.norm) stage<kRows, true, true>(phase, xs, s.rms, s.gather, part, n_rows, base);
            else stage<kRows, true, false>(phase, xs, s.rms, s.gather, part, n_rows, base);
        }
        join_consumers(kConsumers);
        Job job = {0, 0, 0, phase.is_gated ? 2 : 1, part, totals};
        for (int i = 0; i < (phase.is_gated ? 1 : phase.n_w); ++i) {
            const Range tiles = tiles_of(all, phase.w[i]);
            if (tiles.end <= tiles.begin) continue;
            job.weight = i;
            job.first_tile = tiles.begin;
            job.n_tiles = (tiles.end - tiles.begin) * job.sides;
            const int floats = a.part_bytes / 4;
            switch (phase.w[i].format) {
                case PK_BF16: run_job<PK_BF16, kRows>(phase, job, taker, xs, parts, floats, n_rows, base, at); break;
                case PK_FP8_E4M3: run_job<PK_FP8_E4M3, kRows>(phase, job, taker, xs, parts, floats, n_rows, base, at); break;
                case PK_Q8_0: run_job<PK_Q8_0, kRows>(phase, job, taker, xs, parts, floats, n_rows, base, at); break;
                case PK_Q4_K: run_job<PK_Q4_K, kRows>(phase, job, taker, xs, parts, floats, n_rows, base, at); break;
                default: run_job<PK_Q6_K, kRows>(phase, job, taker, xs, parts, floats, n_rows, base, at); break;
            }
            job.totals += job.n_tiles * 16 * kRows;
        }
    }
}

template <int kRows>
__device__ void consume(const Arguments &a, Shared &s, uint8_t *shared, const Layout &layout) {
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    uint8_t *phases = shared + layout.phases + 2 * kProducers * kPhaseStride;
    Taker taker;
    taker.n_slots = a.n_slots;
    taker.probe = a.probe;
    taker.slot_bytes = a.slot_bytes;
    taker.ring = shared + warp * a.n_slots * a.slot_bytes;
    taker.full = shared_address(s.full[warp]);
    taker.empty = shared_address(s.empty[warp]);
    Coming coming;
    if (warp == 0) {
        coming.ask(a.phases, lane);
        coming.put(phases, lane);
    }
    for (int p = 0; p < a.n_phases; ++p) {
        join_consumers(kConsumers);
        const Phase &phase = *reinterpret_cast<const Phase *>(phases + (p & 1) * kPhaseStride);
        if (warp == 0 && p + 1 < a.n_phases) coming.ask(a.phases + p + 1, lane);
        if (phase.kind == kPublish) {
            publish(phase, rows_in<kRows>(phase, s), s.base + p + 1);
        } else if (phase.kind == kMatmul) {
            matmul_phase<kRows>(phase, a, s, shared, layout, taker, p);
        } else if (phase.attend.head_width == 128) {
            attend<128>(phase, a, s.rows, shared + layout.x, s.n_tokens, s.base, p);
        } else {
            attend<64>(phase, a, s.rows, shared + layout.x, s.n_tokens, s.base, p);
        }
        if (warp == 0 && p + 1 < a.n_phases) coming.put(phases + ((p + 1) & 1) * kPhaseStride, lane);
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
