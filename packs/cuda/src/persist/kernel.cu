// The persistent decode kernel: all layers of a step of one row in one launch.
//
// One block a multiprocessor. Four warps of each block stream this block's share of every weight of every phase, and of the
// row's keys and values, into rings in shared memory (one ring a multiplying warp), in order and without regard to what blocks
// wait for: they depend on nothing, so the memory stays busy meanwhile. Eight warps take chunks of 8 rows x 256 or 512 elements
// or of 16 x 256 in turn, leave sums per tile of 8 or 16 rows in one of two buffers, and go on to the next phase; where K allows it, a warp
// multiplies the part of x that it staged itself, so that they do not meet. Four more warps add up and write; whatever an output
// needs beside its sums is there before them. Blocks hand activations on as packets (phase.h), to integer products as the codes that those take (fold.cuh):
// there is no barrier of the grid.
// A buffer of packets is written again eight phases later and read up to four phases later: every phase reads what the one before it
// wrote, so nobody can be that far ahead of a reader. Pages: BF16, FP8, or F16 in a kernel of their own. Weights: BF16, FP8 E4M3 (128 x 128 scales), Q8_0, Q4_K, Q6_K; models of some of them have kernels of their own (Sort).
// No local memory: what 256 threads spill does not fit the L1 that the rings leave, and each reload waits behind the weights.
// Assumes that all blocks are resident at some time: one a multiprocessor, and whatever else runs there ends by itself. A cooperative launch would say so, but would not begin early.
#include "../../include/persist/phase.h"
#ifdef PK_WGMMA
#include "../../include/cluster_launch.h"
#include "../../include/persist/attend.cuh"
#include "../../include/persist/delta.cuh"
#include "../../include/persist/produce.cuh"
#include "../../include/persist/stage.cuh"
#include "../../include/persist/tiles.cuh"
#include "../../include/persist/write.cuh"

namespace pk::persist {
namespace {

struct Shared {
    uint64_t full[kWarps][kMaxSlots], empty[kWarps][kMaxSlots];
    uint64_t described[kPhases], summed[2], written[2], paired[2], known;
    float2 exchange[kPairedNumbers];
    RowFacts row;
    int gather;
    int n_tokens, n_samples;
    uint32_t base;
    volatile int multiplied;  // the phase whose products are under way, or were last
};
static_assert(sizeof(Shared) <= kStaticBytes);

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

// What all but the producers are told of a phase.
__device__ __forceinline__ const Phase &description(uint8_t *shared, const Layout &layout, int p) {
    return *reinterpret_cast<const Phase *>(shared + layout.phases + (kProducers + (p & (kPhases - 1))) * kPhaseStride);
}
__device__ __forceinline__ void ask_description(const Arguments &a, const uint64_t *described, uint8_t *shared, const Layout &layout, int p) {
    const uint32_t barrier = shared_address(described + (p & (kPhases - 1)));
    barrier_expect(barrier, sizeof(Phase));
    copy_bulk(shared_address(&description(shared, layout, p)), a.phases + p, sizeof(Phase), barrier, read_once_policy());
}
__device__ __forceinline__ int rows_in(const Phase &p, const Shared &s) {
    return p.rows_symbol == PK_ROWS_T ? s.n_tokens : p.rows_symbol == PK_ROWS_S ? s.n_samples : static_cast<int>(p.rows_symbol);
}

// Until what the step left for this launch has been read.
__device__ __forceinline__ void await_step(const Shared &s) { barrier_wait(shared_address(&s.known), 0); }

template <Sort kSort>
__device__ __forceinline__ void produce(const Arguments &a, Shared &s, uint8_t *shared, const Layout &layout) {
    Producer producer;
    const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) % kProducers;
    uint8_t *described = shared + layout.phases + warp * kPhaseStride;
    const Phase &phase = *reinterpret_cast<const Phase *>(described);
    producer.lane = lane;
    producer.first = warp * Producer::kRings;
    producer.most_sent = a.most_sent;
    producer.most_ahead = a.most_ahead;
    producer.multiplied = &s.multiplied;
    producer.n_slots = a.n_slots;
    producer.slot_bytes = a.slot_bytes;
    producer.policy = read_once_policy();
    producer.rings = shared_address(shared) + producer.first * a.n_slots * a.slot_bytes;
    producer.full = shared_address(s.full[producer.first]);
    producer.empty = shared_address(s.empty[producer.first]);
    producer.mine.parity = 1;  // the first round finds empty slots
    Coming coming;
    coming.ask(a.phases, lane);
    coming.put(described, lane);
    __syncwarp();
#pragma unroll 1
    for (int p = 0; p < a.n_phases; ++p) {
        if (p + 1 < a.n_phases) coming.ask(a.phases + p + 1, lane);
        // The next phase's boxes, too, are on their way before they are wanted.
        if (const int i = thread_here() - kConsumers; takes(kSort, PK_BF16) && i < 3 && a.boxes != nullptr && p + 1 < a.n_phases) prefetch_box(a.boxes + 3 * (p + 1) + i);
        mark(p, 8, kConsumers);
        // Weights do not depend on the kernels before this one; all else does.
        if (phase.kind == kAttend || phase.kind == kDelta) await_step(s);
        if (phase.kind == kMatmul) producer.send_weights<kSort>(phase, p, a.boxes + 3 * p);
        else if (phase.kind == kAttend) producer.send_positions(phase.attend, a, s.row);
        else if (!is_lean(kSort) && phase.kind == kDelta) producer.send_state(phase, a, s.row);
        __syncwarp();
        mark(p, 9, kConsumers);
        if (p + 1 < a.n_phases) coming.put(described, lane);
        __syncwarp();
    }
}

// x of a phase; the sum of squares of what this warp staged.
template <Sort kSort>
__device__ __forceinline__ float stage_x(const Phase &p, const Arguments &a, int at, uint8_t *xs, int row, uint32_t base, const Met &before) {
    const bool is_integer = !takes(kSort, PK_BF16) || (kSort != kRowMajor && p.staging > kStageFp8);
    if (kSort != kRowMajor && p.fold_x == kInCodes) {
        const float squares = take_folded(p, a, at, xs, base, before);
        return p.norm != nullptr ? warp_sum(squares) : 0.0f;
    }
    if (p.fold_x == kInFours) return warp_sum(is_integer ? take_fours<true>(p, a, at, xs, base, before) : take_fours<false>(p, a, at, xs, base, before));
    if (p.norm == nullptr) return is_integer ? stage<true, false>(p, a, at, xs, row, base, before) : stage<false, false>(p, a, at, xs, row, base, before);
    return warp_sum(is_integer ? stage<true, true>(p, a, at, xs, row, base, before) : stage<false, true>(p, a, at, xs, row, base, before));
}

// By a warp that has nothing more to leave in a buffer of sums, or had nothing.
__device__ __forceinline__ void hand_on(Shared &s, Taker &taker, int lane) {
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&s.summed[taker.n_groups & 1]));
    ++taker.n_groups;
}
__device__ __forceinline__ void await_buffer(const Shared &s, const Taker &taker) { barrier_wait(shared_address(&s.written[taker.n_groups & 1]), (taker.n_groups >> 1 & 1) ^ 1); }

// False: nothing to do for this block.
template <Sort kSort>
__device__ __forceinline__ bool matmul_phase(const Phase &phase, const Arguments &a, Shared &s, uint8_t *shared, const Layout &layout, Taker &taker, int at) {
    const int warp = thread_here() >> 5, lane = thread_here() & 31, is_gated = phase.is_gated;
    uint8_t *xs = shared + layout.x;
    const Range all = range_of(phase);
    if (all.end <= all.begin) return false;
    const int x_index = phase.is_gathered ? s.gather : 0;
    bool has_norm = phase.norm != nullptr;
    const bool is_own = (phase.w[0].n_chunks >> phase.cut) % kWarps == 0;
    // The first piece, so that nothing is left to do when x has come.
    const int n = n_pieces(phase);
    int i = 0, format;
    Group g;
    g.most = tiles_once(phase);
    g.x_row = x_row_bytes(phase.staging, phase.k);
    g.xs = xs;
    auto open = [&] {
        for (;; ++i) {
            const Piece tiles = piece_of(phase, all, i);
            g.n = max(0, tiles.end - tiles.begin) << is_gated;
            g.chunks = tiles.chunks;
            g.from = tiles.first;
            g.has_scales = phase.w[tiles.weight].block_scale != nullptr;
            format = phase.w[tiles.weight].format;
            if (g.n > 0 || i + 1 == n) break;
        }
    };
    open();
    // All warps have left their last sums, or had none to leave.
    const uint32_t last = taker.n_groups - 1;
    const Met before = {taker.n_groups ? shared_address(&s.summed[last & 1]) : 0, last >> 1 & 1};
    const float squares = stage_x<kSort>(phase, a, at, xs, x_index, s.base, before);
    // Usually a warp multiplies what it has staged itself.
    if (is_own) __syncwarp();
    else join_consumers(kConsumers);
    mark(at, 3);
    if (thread_here() == 0) s.multiplied = at;
    // Where the next tiles' sums go.
    auto begin = [&] {
        await_buffer(s, taker);
        return reinterpret_cast<float *>(shared + layout.part + (taker.n_groups & 1) * a.part_bytes + kSumsAt) + (thread_here() >> 5) * kWarpSums;
    };
    // The last ones are handed on.
    auto end = [&] {
        if (has_norm && (thread_here() & 31) == 0) reinterpret_cast<float *>(shared + layout.part + (taker.n_groups & 1) * a.part_bytes + kSquaresAt)[thread_here() >> 5] = squares;
        has_norm = false;
        hand_on(s, taker, thread_here() & 31);
    };
    auto turn = [&] {
        end();
        return begin();
    };
#pragma unroll 1
    while (true) {
        float *const to = begin();
        auto multiply_as = [&](auto one) {
            if constexpr (takes(kSort, one())) multiply<one()>(g, taker, to, turn);
        };
        switch (format) {
            case PK_BF16: multiply_as(std::integral_constant<int32_t, PK_BF16>()); break;
            case PK_FP8_E4M3: multiply_as(std::integral_constant<int32_t, PK_FP8_E4M3>()); break;
            case PK_Q8_0: multiply_as(std::integral_constant<int32_t, PK_Q8_0>()); break;
            case PK_Q4_K: multiply_as(std::integral_constant<int32_t, PK_Q4_K>()); break;
            default: multiply_as(std::integral_constant<int32_t, PK_Q6_K>()); break;
        }
        mark(at, 4);
        mark(at, 7, kConsumers - 32);
#ifdef PK_PERSIST_TRACE
        if (trace_room && thread_here() == 0) put_mark(at, 2, g.waited);
#endif
        end();
        if (++i >= n) break;
        open();
        if (g.n <= 0) break;
    }
    return true;
}

// What the step left for this launch, which may have begun before the kernels in front of it have ended.
__device__ __forceinline__ void read_step(const Arguments &a, Shared &s) {
    if (threadIdx.x != 32) return;
    wait_dependence();
    s.n_tokens = __ldcg(&a.info->n_tokens);
    s.n_samples = __ldcg(&a.info->n_samples);
    s.base = __ldcg(a.epochs);
    if (s.n_tokens > 0 && a.row_position != nullptr) s.row = {__ldcg(a.row_position), __ldcg(a.row_slot), __ldcg(a.token_page), __ldcg(a.row_flags) & PK_ROW_DEAD};
    if (s.n_samples > 0 && a.sample_at != nullptr) s.gather = __ldcg(a.sample_at);
    mark_block(a, kKnown);
    barrier_arrive(shared_address(&s.known));
}

template <Sort kSort>
__device__ __forceinline__ void consume(const Arguments &a, Shared &s, uint8_t *shared, const Layout &layout) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    Taker taker;
    taker.n_slots = a.n_slots;
    taker.slot_bytes = a.slot_bytes;
    taker.ring = shared + warp * a.n_slots * a.slot_bytes;
    taker.full = shared_address(s.full[warp]);
    taker.empty = shared_address(s.empty[warp]);
    taker.paired = shared_address(s.paired);
    taker.exchange = shared_address(s.exchange);
    read_step(a, s);
    await_step(s);
#pragma unroll 1
    for (int p = 0; p < a.n_phases; ++p) {
        mark(p, 0);
        const Phase &phase = description(shared, layout, p);
        barrier_wait(shared_address(&s.described[p & (kPhases - 1)]), p / kPhases & 1);
        bool has_part = false;
        if (phase.kind == kMatmul) has_part = matmul_phase<kSort>(phase, a, s, shared, layout, taker, p);
        else if (!is_lean(kSort) && phase.kind == kDelta) delta_step(phase, a, s.row, shared + layout.x, taker, s.base, p);
        else if (phase.kind == kAttend) attend_any<kSort>(phase, a, s.row, shared + layout.x, taker, s.base, p);
        if (!has_part) {
            await_buffer(s, taker);
            hand_on(s, taker, lane);
        }
    }
}

// Warps that write: they know what an output needs before its sums are complete, and the others go on to the next phase meanwhile.
__device__ __forceinline__ void write(const Arguments &a, Shared &s, uint8_t *shared, const Layout &layout) {
    const int tid = threadIdx.x - (kThreads - 32 * kWriters);
    uint32_t n_groups = 0;
    await_step(s);
    auto await_sums = [&] { barrier_wait(shared_address(&s.summed[n_groups & 1]), n_groups >> 1 & 1); };
    auto give_back = [&] {
        __syncwarp();
        if ((tid & 31) == 0) barrier_arrive(shared_address(&s.written[n_groups & 1]));
        ++n_groups;
    };
#pragma unroll 1
    for (int p = 0; p < a.n_phases; ++p) {
        const Phase &phase = description(shared, layout, p);
        barrier_wait(shared_address(&s.described[p & (kPhases - 1)]), p / kPhases & 1);
        const Range all = phase.kind == kMatmul ? range_of(phase) : Range{0, 0};
        const bool is_there = rows_in(phase, s) > 0;
        if (phase.kind == kPublish && is_there) publish(phase, tid, s.base + p + 1);
        bool is_first = true;
        float factor = 1.0f;
#pragma unroll 1
        for (int i = 0; all.begin < all.end && i < n_pieces(phase); ++i) {
            const Piece tiles = piece_of(phase, all, i);
            const Weight &w = phase.w[tiles.weight];
            const int n_tiles = max(0, tiles.end - tiles.begin) << phase.is_gated, most = tiles_once(phase);
#pragma unroll 1
            for (int first = 0; first < n_tiles; first += most) {
                const uint8_t *buffer = shared + layout.part + (n_groups & 1) * a.part_bytes;
                const float *const sums = reinterpret_cast<const float *>(buffer + kSumsAt);
                const int first_row = (tiles.begin + (first >> phase.is_gated)) << phase.tile_shift,
                          n_outputs = is_there ? min(most, n_tiles - first) >> phase.is_gated << phase.tile_shift : 0;
                Output output;
                output.prepare(phase, w, sums, first_row + tid, tid, tid < n_outputs, s.base);
                const bool has_norm = is_first && phase.norm != nullptr;
                const NormFactor norm = {phase.inverse_k, phase.eps};
                const uint32_t epoch = s.base + p + 1;
                const bool is_part = phase.cut && i != 1, is_sent = phase.cut && i == 0;
                await_sums();
                mark(p, 5, kThreads - 32 * kWriters);
                float2 taken = output.take();
                if (has_norm) factor = norm.of(reinterpret_cast<const float *>(buffer + kSquaresAt));
                // Of cut tiles the end in front belongs to the block before, the beginning behind to this one.
                if (__builtin_expect(is_part, 0) && tid < n_outputs) output.join_end(taken, end_place(phase, a, p, i == 0 ? 0 : 1) + 8 * tid, i == 0, epoch);
#pragma unroll 1
                for (int o = tid; !is_sent && o - (tid & 31) < n_outputs;) {
                    output.write(taken, factor, epoch);
                    o += 32 * kWriters;
                    if (o - (tid & 31) >= n_outputs) break;
                    output.prepare(phase, w, sums, first_row + o, o, o < n_outputs, s.base);
                    taken = output.take();
                }
                mark(p, 6, kThreads - 32 * kWriters);
                give_back();
                if (is_first && phase.normed.data && is_there) write_normed(phase, phase.is_gathered ? s.gather : 0, factor, s.base, tid);
                is_first = false;
            }
        }
        if (is_first) {
            await_sums();
            give_back();
        }
        join_writers(32 * kWriters);
        if (tid == 0 && p + kPhases < a.n_phases) ask_description(a, s.described, shared, layout, p + kPhases);
    }
}

template <Sort kSort>
__global__ void __launch_bounds__(kThreads, 1) persist_kernel(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ Shared s;
    const Layout layout = layout_of(a);
    // A ring's barrier a thread: by one thread all of them are a microsecond.
    if (threadIdx.x < kWarps * kMaxSlots) {
        barrier_init(shared_address(&s.full[0][0]) + 8 * threadIdx.x, 1);
        barrier_init(shared_address(&s.empty[0][0]) + 8 * threadIdx.x, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    if (threadIdx.x == kThreads - 1) {
        mark_block(a, kEntered);
        for (int i = 0; i < kPhases; ++i) barrier_init(shared_address(&s.described[i]), 1);
        barrier_init(shared_address(&s.known), 1);
        for (int i = 0; i < 2; ++i) {
            barrier_init(shared_address(&s.summed[i]), kWarps);
            barrier_init(shared_address(&s.written[i]), kWriters);
            barrier_init(shared_address(&s.paired[i]), 1);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        s.row = {0, 0, 0, 1};
        s.gather = 0;
        s.multiplied = -1;
        for (int i = 0; i < min(kPhases, a.n_phases); ++i) ask_description(a, s.described, shared, layout, i);
    }
    __syncthreads();
    if (a.paired) join_cluster();  // barriers are there before the other block sends to them
    if (threadIdx.x == 0) mark_block(a, kBegun);
    if (threadIdx.x >= kThreads - 32 * kWriters) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kOtherRegisters));
        write(a, s, shared, layout);
    } else if (threadIdx.x >= kConsumers) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kOtherRegisters));
        produce<kSort>(a, s, shared, layout);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
        consume<kSort>(a, s, shared, layout);
    }
    __syncthreads();
    if (threadIdx.x == 0) mark_block(a, kEnded);
    // The last block to end moves the epoch on: all others have read it.
    if (threadIdx.x == 0 && atomicAdd(a.epochs + 1, 1) == gridDim.x - 1) {
        a.epochs[0] = s.base + a.n_phases;
        a.epochs[1] = 0;
    }
}

}  // namespace

// All blocks at once, by twos where they share heads; weights are asked for while the kernel before ends.
template <int kRows, Sort kSort>
int32_t launch_rows(const Launch &l, const Arguments &a, int n_blocks) {
    static_assert(kRows == 1);
    return launch_clusters(l, "persist", persist_kernel<kSort>, n_blocks, kThreads, layout_of(a).end, a.paired ? 2 : 0, a);
}

template <Sort kSort>
bool fits_pairs(const Arguments &a, int n_blocks, cudaStream_t stream) {
    Arguments paired = a;
    paired.paired = 1;
    int n = 0;
    return n_blocks % 2 == 0 && clusters_at_once("persist", reinterpret_cast<const void *>(persist_kernel<kSort>), n_blocks, kThreads, layout_of(paired).end, 2, stream, &n) == PK_OK && n >= n_blocks / 2;
}

}  // namespace pk::persist

#ifdef PK_PERSIST_TRACE
// Makes room for n words of marks, all zero, or reads them: the last launch's.
extern "C" __attribute__((visibility("default"))) int pk_persist_trace(int64_t n, long long *out) {
    static long long *room = nullptr;
    if (out != nullptr) return cudaMemcpy(out, room, n * 8, cudaMemcpyDeviceToHost);
    if (cudaMalloc(&room, n * 8) != cudaSuccess || cudaMemset(room, 0, n * 8) != cudaSuccess) return 1;
    return cudaMemcpyToSymbol(pk::persist::trace_room, &room, sizeof room);
}
#endif
#else
namespace pk::persist {
template <int kRows, Sort kSort>
int32_t launch_rows(const Launch &, const Arguments &, int) {
    return fail(PK_UNSUPPORTED, "persist: this architecture has no such kernel");
}
template <Sort kSort>
bool fits_pairs(const Arguments &, int, cudaStream_t) {
    return false;
}
}  // namespace pk::persist
#endif

#ifndef PK_PERSIST_SORT
#define PK_PERSIST_SORT kEverything
#endif
template int32_t pk::persist::launch_rows<PK_PERSIST_ROWS, pk::persist::PK_PERSIST_SORT>(const pk::Launch &, const pk::persist::Arguments &, int);
template bool pk::persist::fits_pairs<pk::persist::PK_PERSIST_SORT>(const pk::persist::Arguments &, int, cudaStream_t);
