// What fills the rings: weights, keys and values of earlier tokens, states, in the order of phases and whatever the block waits for.
#pragma once
#include "attend.cuh"
#include "delta.cuh"
#include "write.cuh"

namespace pk::persist {

// Waits until the chunk that a ring was sent `back` chunks ago has landed; parity: what the next one's slot is awaited with.
__device__ __forceinline__ void await_landing(uint32_t full, const Slot &slot, int back, int n_slots) {
    const bool wraps = slot.at < back;
    barrier_wait(full + 8 * (wraps ? slot.at - back + n_slots : slot.at - back), wraps ? slot.parity : slot.parity ^ 1);
}

// A producer warp fills kWarps / kProducers rings. Each of a few lanes knows a chunk that is sent with the others' in one pass.
struct Producer {
    static constexpr int kRings = kWarps / kProducers, kSenders = 2 * kRings;
    uint64_t policy;
    uint32_t rings, full, empty;  // of the warp's first ring
    int lane, first, most_sent, most_ahead, n_slots, slot_bytes;
    Slot mine;                    // of ring lane % kRings
    const volatile int *multiplied;  // the phase that is multiplied with
    // Of the last attention: what this block does of it, and where this lane's first group lies. Most layers' are alike, and each would wait for its page's number.
    int window = -1, kv_heads = 0, width = 0, head = -1, begin, end, page, inside;

    // Waits until no more than `most` chunks of a ring would be under way: what lands later than it must keeps others waiting.
    __device__ __forceinline__ void await_sent(int ring, const Slot &slot, int most) const {
        if (most) await_landing(full + 8 * ring * kMaxSlots, slot, most, n_slots);
    }
    // Until a slot may be filled.
    __device__ __forceinline__ void await_empty(int ring, const Slot &slot) const { barrier_wait(empty + 8 * (ring * kMaxSlots + slot.at), slot.parity); }
    // By one lane a ring: sends `bytes` from one run of memory, to `shift` in the slot.
    __device__ __forceinline__ void send_run(const uint8_t *from, int bytes, int shift = 0) {
        const uint32_t barrier = full + 8 * (lane * kMaxSlots + mine.at);
        await_sent(lane, mine, most_sent);
        await_empty(lane, mine);
        barrier_expect(barrier, bytes);
        copy_bulk(rings + (lane * n_slots + mine.at) * slot_bytes + shift, from, bytes, barrier, policy);
        mine.advance(n_slots);
    }
    // What the lanes of send_run know for the others.
    __device__ __forceinline__ void agree() {
        __syncwarp();
        mine = {__shfl_sync(~0u, mine.at, lane % kRings), __shfl_sync(~0u, mine.parity, lane % kRings)};
    }
    // Weights come as boxes, as chunks, or as chunks in two parts.
    enum Kind { kBoxes, kChunks, kParts };
    // Tiles of phase p. Two chunks to each ring in a pass: of row-major formats its next two, of block formats those of two tiles that are multiplied at once. What
    // this block does not multiply with yet has fewer under way, perhaps one only: blocks that are behind want theirs now.
    template <Kind kKind>
    __device__ __forceinline__ void send_tiles(const Phase &phase, int p, const Piece &tiles, const CUtensorMap *boxes) {
        constexpr bool kHasBoxes = kKind == kBoxes;
        const int is_gated = phase.is_gated, ring = lane % kRings, ahead = lane / kRings;
        const Weight &w = phase.w[tiles.weight], &other = phase.w[is_gated ? 1 : tiles.weight];
        const int chunks = tiles.chunks, n_tiles = max(0, tiles.end - tiles.begin) << is_gated, n = (kHasBoxes ? n_tiles : (n_tiles + 1) / 2) * chunks;
        const int bytes = kHasBoxes ? w.block_scale != nullptr ? kBoxBytes + 16 : kBoxBytes : block_chunk_bytes(w.format), row_bytes = kHasBoxes ? 4 * w.scale_stride : w.n_chunks * bytes;
        const int64_t skipped = kHasBoxes ? 0 : static_cast<int64_t>(tiles.begin) * row_bytes + tiles.first * bytes;
        const uint8_t *const gate = kHasBoxes ? reinterpret_cast<const uint8_t *>(w.block_scale) : w.data + skipped,
                      *const up = kHasBoxes ? reinterpret_cast<const uint8_t *>(other.block_scale) : other.data + skipped;
        const uint32_t inverse = 0xffffffffu / static_cast<uint32_t>(chunks) + 1;  // 0: of one
        constexpr uint32_t kAll = (1 << kSenders) - 1;
        // Ahead of need chunks in parts go one by one: by twos a ring would have three slots' bytes under way, and blocks that are behind wait for theirs.
        const bool is_single = most_ahead == 1 || kKind == kParts;
        if (lane >= kSenders) return;
#pragma unroll 1
        for (int pass = first, turn = 0; pass < n;) {
            // turn: what is left of a pass is the second tile's chunk.
            const bool is_wanted = __ballot_sync(kAll, *multiplied == p) & 1, takes = turn ? ahead : is_wanted || !is_single || !ahead;
            const int j = pass + ring + (kHasBoxes ? ahead * kWarps : 0), whole = inverse ? __umulhi(j, inverse) : j, chunk = j - whole * chunks;
            const int t = kHasBoxes ? whole : 2 * whole + ahead;
            const bool is_up = t & is_gated, is_valid = j < n && takes && (kHasBoxes || t < n_tiles);
            Slot slot = mine;
            if (ahead && !turn) slot.advance(n_slots);
            if (is_valid) await_sent(ring, slot, is_wanted ? most_sent : most_ahead);
            // Together: a lane that is ahead of another of its ring would fill the slot whose chunk that one still awaits, and a parity does not tell a round from
            // the next but one.
            const uint32_t valid = __ballot_sync(kAll, is_valid) >> ring;
            const int n_valid = (valid & 1) + (valid >> kRings & 1);
            if (is_valid) {
                const uint32_t to = rings + (ring * n_slots + slot.at) * slot_bytes, barrier = full + 8 * (ring * kMaxSlots + slot.at);
                const uint8_t *from = is_up ? up : gate;
                await_empty(ring, slot);
                if constexpr (kKind == kBoxes) {
                    const int tile = tiles.begin + (t >> is_gated);
                    barrier_expect(barrier, bytes);
                    copy_box(to, boxes + (is_up ? 1 : tiles.weight), chunk * (kBoxWidth / 4), tile * kBoxRows, barrier, policy);
                    if (from != nullptr) copy_bulk(to + kBoxBytes, from + static_cast<int64_t>(tile / (128 / kBoxRows)) * row_bytes + chunk * 16, 16, barrier, policy);
                } else {
                    from += static_cast<int64_t>(t >> is_gated) * row_bytes + chunk * bytes;
                    if constexpr (kKind == kChunks) {
                        barrier_expect(barrier, bytes);
                        copy_bulk(to, from, bytes, barrier, policy);
                    } else {
                        barrier_expect(barrier, kFirstBytes);
                        copy_bulk(to, from, kFirstBytes, barrier, policy);
                        // The rest behind the last tile's slot; the second tile's may land before it is expected, as the barrier also waits for this arrival.
                        const bool is_pair = 2 * whole + 1 < n_tiles;
                        slot.advance(n_slots);
                        if (is_pair && !ahead) slot.advance(n_slots);
                        await_empty(ring, slot);
                        const uint32_t rest_barrier = full + 8 * (ring * kMaxSlots + slot.at);
                        if (!ahead) barrier_expect(rest_barrier, (1 + is_pair) * kRestBytes);
                        copy_bulk(rings + (ring * n_slots + slot.at) * slot_bytes + ahead * kRestBytes, from + kFirstBytes, kRestBytes, rest_barrier, policy);
                    }
                }
            }
            if (n_valid > 0) mine.advance(n_slots);
            if (n_valid > 1) mine.advance(n_slots);
            // Parts: behind the last tile.
            if (kKind == kParts && n_valid > 0 && (turn || is_wanted || !is_single || 2 * whole + 1 >= n_tiles)) mine.advance(n_slots);
            turn = !kHasBoxes && is_single && !is_wanted && !turn;
            if (!turn) pass += kHasBoxes && (is_wanted || !is_single) ? 2 * kWarps : kWarps;
        }
    }
    // boxes: of the phase's weights, where they are row-major.
    template <Sort kSort>
    __device__ __forceinline__ void send_weights(const Phase &phase, int p, const CUtensorMap *boxes) {
        const Range all = range_of(phase);
#pragma unroll 1
        for (int i = 0; i < n_pieces(phase); ++i) {
            const Piece tiles = piece_of(phase, all, i);
            const int format = phase.w[tiles.weight].format;
            if (takes(kSort, PK_BF16) && (kSort == kRowMajor || is_rows(format))) send_tiles<kBoxes>(phase, p, tiles, boxes);
            else if (takes(kSort, PK_Q6_K) && is_parted(format, slot_bytes)) send_tiles<kParts>(phase, p, tiles, nullptr);
            else if (kSort != kRowMajor) send_tiles<kChunks>(phase, p, tiles, nullptr);
            __syncwarp();
        }
    }
    // Keys and values of the row's earlier tokens, a group of 16 positions to each ring in turn.
    __device__ __forceinline__ void send_positions(const Attend &t, const Arguments &a, const RowFacts &facts) {
        const int32_t *pages = a.page_table + static_cast<int64_t>(facts.slot) * a.slot_pages;
        if (t.window != window || t.n_kv_heads != kv_heads || t.head_width != width) {
            const Span span = span_of(t, facts.position, a.paired);
            window = t.window;
            kv_heads = t.n_kv_heads;
            width = t.head_width;
            head = facts.is_dead ? -1 : span.head;
            begin = span.first + (first + lane) * 16;
            end = span.last;
            inside = begin % a.page_tokens;
            page = head >= 0 && lane < kRings && begin < end ? __ldg(pages + begin / a.page_tokens) : 0;
            // Everybody waits for the few blocks that attend: they may ask for more than is wanted.
            if (head >= 0 && span.n_splits <= 2) most_ahead = most_sent;
        }
        if (head < 0) return;
        if (lane < kRings) {
            const int row = 2 * t.head_width >> t.is_fp8, n_pieces = group_pieces(slot_bytes, row / 2), bytes = 16 * row / n_pieces;
#pragma unroll 1
            for (int at = begin, here = page; at < end; at += 16 * kWarps) {
                const int next = at + 16 * kWarps < end ? __ldg(pages + (at + 16 * kWarps) / a.page_tokens) : 0;
                const uint8_t *from = a.kv + static_cast<int64_t>(here) * a.page_stride + (static_cast<int64_t>(head) * a.page_tokens + (at == begin ? inside : at % a.page_tokens)) * row;
#pragma unroll 1
                for (int piece = 0; piece < 2 * n_pieces; ++piece)
                    send_run(from + (piece < n_pieces ? t.k_offset + piece * bytes : t.v_offset + (piece - n_pieces) * bytes), bytes, (piece & n_pieces - 1) * piece_shift(slot_bytes, row / 2));
                here = next;
            }
        }
        agree();
    }
    // A delta head's state, so many rows to each ring.
    __device__ __forceinline__ void send_state(const Phase &p, const Arguments &a, const RowFacts &facts) {
        const int head = delta_head(p);
        if (head < 0 || facts.is_dead) return;
        const uint8_t *from = reinterpret_cast<const uint8_t *>(state_of(p.delta, a, facts, head)) + (first + lane) * (4 * kDeltaRows * kDeltaWidth);
        if (lane < kRings)
#pragma unroll 1
            for (int i = 0; i < kDeltaRows / kPieceRows; ++i) send_run(from + i * kPieceBytes, kPieceBytes);
        agree();
    }
};


}  // namespace pk::persist
