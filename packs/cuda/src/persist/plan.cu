// Puts phases of the persistent decode kernel (read.cu) together to runs. A run is a row of records that are phases, each of
// which reads what the one before it wrote, or products beside each other that read the same; any other record ends it and is launched on its own.
#include "../../include/persist/draft.h"

#include <algorithm>
#include <cmath>

#include "../../../host/guess.h"
#include "../../include/gemm.cuh"
#include "../../include/parted.h"

namespace pk::persist {
namespace {

constexpr int64_t kSharedBytes = 227 * 1024 - kStaticBytes;
constexpr int kReach = 4;                            // how many phases back a phase may read
constexpr int kPairedGroups = 16;                    // groups of 16 positions of a head up to which two blocks share it

// The phase among [0, n) whose output tensor t is, or lies in; -1: none; -2: one that t cannot be read from as packets.
int writer_of(const std::vector<Draft> &drafts, int n, const pk_tensor &t) {
    for (int i = n - 1; i >= 0; --i) {
        const pk_tensor &y = drafts[i].y;
        const uint64_t end = y.data + (kMaxRows - 1) * y.stride + y.cols * element_bytes(y), last = t.data + (kMaxRows - 1) * t.stride + t.cols * element_bytes(t);
        if (end <= t.data || last <= y.data) continue;
        const int64_t offset = static_cast<int64_t>(t.data - y.data) / element_bytes(y);
        const bool fits = t.data >= y.data && t.stride == y.stride && t.format == y.format && offset % 4 == 0 && offset + t.cols <= y.cols && t.cols % 4 == 0;
        return fits ? i : -2;
    }
    return -1;
}

// Elements that a row of a phase's x has.
int64_t x_cols(const Draft &d) { return d.phase.kind == kMatmul ? d.phase.k : d.x.cols; }

// A run being put together: publishing phases first, then the others.
struct Building {
    int32_t n_blocks;
    std::vector<Draft> drafts;
    std::vector<int> x_from, add_from;  // phases; -1: memory
    std::vector<bool> is_read;          // by a later one

    // False when the phase cannot follow.
    bool add(const Draft &d) {
        const int n = static_cast<int>(drafts.size());
        if (n > 0 && d.phase.kind == kMatmul && d.phase.norm == nullptr && d.x.data == drafts[n - 1].normed && d.x.data) return add_beside(d);
        if (d.phase.kind == kAttend && std::any_of(drafts.begin(), drafts.end(), [&](const Draft &other) { return other.phase.kind == kAttend && other.phase.attend.is_half != d.phase.attend.is_half; })) return false;
        pk_tensor x = d.x;
        x.cols = x_cols(d);
        const int from = writer_of(drafts, n, x);
        if (from == -2 || (n > 0) != (from >= 0) || (from >= 0 && (is_read[from] || n - from > kReach))) return false;
        int add_source = -1;
        if (d.add.data) {
            add_source = writer_of(drafts, n, d.add);
            if (add_source == -2 || (add_source >= 0 && n - add_source > kReach) || (add_source == -1 && n >= kReach)) return false;
            if (d.phase.kind == kMatmul && (d.add.data != d.y.data || d.add.stride != d.y.stride || d.add.format != d.y.format)) return false;
        }
        // What nobody has read is read now: so no block can be ahead of a reader by more than the phases in between.
        for (int i = 0; i < n; ++i)
            if (!is_read[i] && i != from && i != add_source) return false;
        // Nothing in a phase may be written while others still read it.
        const uint64_t x_end = x.data + (kMaxRows - 1) * x.stride + x.cols * element_bytes(x), y_end = d.y.data + (kMaxRows - 1) * d.y.stride + d.y.cols * element_bytes(d.y);
        if (from == -1 && d.y.data < x_end && x.data < y_end) return false;
        if (from >= 0) is_read[from] = true;
        if (add_source >= 0) is_read[add_source] = true;
        put(n, d, from, add_source);
        return true;
    }

    // A product of the rows that the last phase norms. One that does not employ every block comes first: others go on meanwhile.
    bool add_beside(Draft d) {
        const int n = static_cast<int>(drafts.size());
        const Draft &last = drafts[n - 1];
        if (last.phase.is_gathered || last.add.data || d.add.data || x_cols(d) != x_cols(last) || d.phase.rows_symbol != last.phase.rows_symbol || is_read[n - 1]) return false;
        if (writer_of(drafts, n, d.y) == n - 1 || d.y.data == last.x.data) return false;
        d.x = last.x;
        d.phase.norm = last.phase.norm;
        d.phase.eps = last.phase.eps;
        d.phase.inverse_k = last.phase.inverse_k;
        put(d.phase.n_tiles < n_blocks ? n - 1 : n, d, x_from[n - 1], -1);
        return true;
    }

    void put(int at, const Draft &d, int from, int add_source) {
        drafts.insert(drafts.begin() + at, d);
        x_from.insert(x_from.begin() + at, from);
        add_from.insert(add_from.begin() + at, add_source);
        is_read.insert(is_read.begin() + at, false);
    }
};

// How a product's tiles, or pairs of them, are cut so that no block has more than it must: 0, not at all; 1, halves of tiles; 2, quarters of pairs. longest: then of a block, in quarters of tiles.
int32_t cut_of(const Phase &p, bool is_paired, int32_t n_blocks, int32_t *longest) {
    const int32_t n = p.n_tiles >> is_paired, cut = is_paired ? 2 : 1, whole = (n + n_blocks - 1) / n_blocks << cut, parts = ((n << cut) + n_blocks - 1) / n_blocks;
    const bool is_cut = !is_rows(p.w[0].format) && (p.is_gated || p.n_w == 1) && p.w[0].n_chunks % (1 << cut) == 0 && n > n_blocks && parts < whole;
    *longest = (is_cut ? parts : whole) * 2;
    return is_cut ? cut : 0;
}

// How the writer may leave what is all that the reader takes: as codes of integers if tiles by twos keep no block longer, else in fours for a norm, which are what its rows are defined as.
Fold fold_between(const Draft &writer, const Draft &reader, int32_t n_blocks) {
    const Phase &w = writer.phase, &r = reader.phase;
    const bool is_integer = r.staging > kStageFp8;
    if (r.kind != kMatmul || r.is_gathered || reader.x.data != writer.y.data || r.k != writer.y.cols) return kUnfolded;
    if (w.kind == kAttend) return is_integer && w.attend.head_width % 32 == 0 ? kInCodes : kUnfolded;
    if (w.kind != kMatmul || is_rows(w.w[0].format) == is_integer) return kUnfolded;
    auto comes_by = [&](int32_t least) { return std::all_of(w.w, w.w + w.n_w, [least](const Weight &one) { return one.rows % least == 0 && one.first_column % least == 0; }); };
    int32_t paired, single;
    cut_of(w, true, n_blocks, &paired);
    cut_of(w, false, n_blocks, &single);
    if (is_integer && comes_by(32) && paired <= single) return kInCodes;
    return r.norm != nullptr && comes_by(4) ? kInFours : kUnfolded;
}

Draft publisher_of(const pk_tensor &t, int64_t cols, int64_t rows_symbol) {
    Draft d;
    d.phase.kind = kPublish;
    d.phase.k = static_cast<int32_t>(cols);
    d.phase.rows_symbol = rows_symbol;
    d.x = d.y = t;
    d.phase.x = d.phase.y = place_of(t);
    return d;
}

// Publishing phases in front, sources as numbers of phases, and which outputs are written to memory or as packets.
std::vector<Phase> number_phases(const Building &b, std::vector<int64_t> *packet_bytes, int32_t rows) {
    std::vector<Draft> all;
    std::vector<int> x_from(b.drafts.size()), add_from(b.drafts.size());
    const pk_tensor &first = b.drafts[0].x;
    all.push_back(publisher_of(first, x_cols(b.drafts[0]), b.drafts[0].phase.is_gathered ? PK_ROWS_T : b.drafts[0].phase.rows_symbol));
    for (size_t i = 0; i < b.drafts.size(); ++i)
        if (b.drafts[i].add.data && b.add_from[i] < 0) {
            const bool same = b.drafts[i].add.data == first.data && b.drafts[i].add.stride == first.stride && b.drafts[i].add.format == first.format && b.drafts[i].add.cols <= x_cols(b.drafts[0]);
            add_from[i] = same ? 0 : static_cast<int>(all.size());
            if (!same) all.push_back(publisher_of(b.drafts[i].add, b.drafts[i].add.cols, b.drafts[i].phase.rows_symbol));
        }
    const int shift = static_cast<int>(all.size());
    for (size_t i = 0; i < b.drafts.size(); ++i) {
        x_from[i] = b.x_from[i] < 0 ? 0 : b.x_from[i] + shift;
        if (b.add_from[i] >= 0) add_from[i] = b.add_from[i] + shift;
        all.push_back(b.drafts[i]);
    }
    packet_bytes->assign(all.size(), 0);
    std::vector<const Draft *> folded_for(all.size(), nullptr);
    auto read = [&](Place *place, const pk_tensor &t, int from) {
        *place = place_of(t);
        place->source = from;
        // For now the distance into the writer's buffer; its address is added later.
        place->packets = (t.data - all[from].y.data) / element_bytes(t) * (t.format == PK_F32 ? 8 : 4);
        all[from].phase.y.packets = 1;
        (*packet_bytes)[from] = rows * all[from].y.stride / element_bytes(t) * (t.format == PK_F32 ? 8 : 4);
    };
    for (size_t i = 0; i < b.drafts.size(); ++i) {
        Draft &d = all[shift + i];
        Draft &writer = all[x_from[i]];
        const Draft *&first_reader = folded_for[x_from[i]];
        const Fold fold = rows == 1 ? fold_between(writer, d, b.n_blocks) : kUnfolded;
        const bool is_folded = fold != kUnfolded && (first_reader == nullptr || (writer.phase.fold_y == fold && first_reader->phase.norm == d.phase.norm && first_reader->phase.staging == d.phase.staging));
        if (is_folded) {
            first_reader = &d;
            writer.phase.fold_y = d.phase.fold_x = fold;
            writer.phase.folded_norm = d.phase.norm;
            writer.phase.folded_staging = d.phase.staging;
            writer.phase.is_paired = writer.phase.kind == kMatmul && fold == kInCodes;
            d.phase.folded_x = 1;
            d.phase.x = place_of(d.x);
            d.phase.x.source = x_from[i];
        }
        if (!is_folded || d.phase.normed.data) read(&d.phase.x, d.x, x_from[i]);
        d.phase.is_plain = x_from[i] == 0 && d.phase.norm != nullptr && !d.phase.is_gathered;
        if (d.add.data) read(&d.phase.add, d.add, add_from[i]);
        d.phase.y = place_of(d.y);
        // Heads that share a tail look at each other's outputs.
        if (d.phase.kind == kDelta) {
            d.phase.y.packets = 1;
            (*packet_bytes)[shift + i] = rows * d.y.stride / element_bytes(d.y) * (d.y.format == PK_F32 ? 8 : 4);
        }
    }
    // Folded outputs lie behind packets, never at the beginning of a buffer.
    for (size_t i = 0; i < all.size(); ++i) {
        if (folded_for[i] == nullptr) continue;
        const int64_t at = std::max<int64_t>(256, ((*packet_bytes)[i] + 255) / 256 * 256);
        all[i].phase.folded_y = at;
        for (size_t k = i + 1; k < all.size(); ++k)
            if (all[k].phase.folded_x && all[k].phase.x.source == static_cast<int32_t>(i)) all[k].phase.folded_x = at;
        (*packet_bytes)[i] = at + folded_at(all[i].phase.fold_y, folded_for[i]->phase.k);
    }
    std::vector<Phase> phases;
    for (size_t i = 0; i < all.size(); ++i) {
        Phase p = all[i].phase;
        for (size_t j = i + 1; j < all.size(); ++j) {
            if (all[j].phase.kind != kPublish && all[j].y.data == all[i].y.data) p.y.data = 0;  // the last one to write an address does
            if (all[j].normed == all[i].normed) p.normed.data = 0;
        }
        if (p.kind == kPublish) p.y.data = 0;
        p.shift = static_cast<int32_t>(i * 37);
        phases.push_back(p);
    }
    return phases;
}

bool has_rows(const Phase &p) { return p.kind == kMatmul && is_rows(p.w[0].format); }

// Maps of the boxes that row-major weights are copied in, three a phase: words of four bytes, as no side of a box may have more than 256 elements.
int32_t make_boxes(decltype(&cuTensorMapEncodeTiled) encode, const std::vector<Phase> &phases, std::vector<CUtensorMap> *boxes) {
    const CUtensorMap *any = nullptr;
    for (size_t i = 0; i < phases.size(); ++i) {
        const Phase &p = phases[i];
        for (int k = 0; p.kind == kMatmul && k < p.n_w; ++k) {
            const Weight &w = p.w[k];
            if (!is_rows(w.format)) continue;
            const cuuint64_t size[2] = {static_cast<cuuint64_t>(p.k) * (w.format == PK_BF16 ? 2 : 1) / 4, static_cast<cuuint64_t>(w.rows)}, stride[1] = {static_cast<cuuint64_t>(w.row_bytes)};
            const cuuint32_t box[2] = {kBoxWidth / 4, kBoxRows}, step[2] = {1, 1};
            const CUresult e = encode(&(*boxes)[3 * i + k], CU_TENSOR_MAP_DATA_TYPE_UINT32, 2, const_cast<uint8_t *>(w.data), size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                      CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
            if (e != CUDA_SUCCESS) return fail(PK_DEVICE, "persist: tensor map of %d rows of %lld bytes: CUDA driver error %d", w.rows, static_cast<long long>(w.row_bytes), static_cast<int>(e));
            any = &(*boxes)[3 * i + k];
        }
    }
    // Maps are asked for ahead by their places: none is without meaning.
    for (size_t i = 0; any != nullptr && i < boxes->size(); ++i)
        if (const Phase &p = phases[i / 3]; p.kind != kMatmul || static_cast<int>(i % 3) >= p.n_w || !is_rows(p.w[i % 3].format)) (*boxes)[i] = *any;
    return PK_OK;
}

// Gives weights beside each other blocks of their own if no block is busier then: one that has tiles of two weights begins anew with the second, and everybody waits for it.
void divide(Phase *p, int32_t n_blocks) {
    if (p->n_w < 2 || p->is_gated || p->is_paired || p->n_tiles <= n_blocks) return;
    constexpr double kLonger = 2.2;  // a tile of Q6_K than one of Q4_K
    const bool is_mixed = std::any_of(p->w, p->w + p->n_w, [p](const Weight &w) { return w.format != p->w[0].format; });
    auto cost = [&](const Weight &w) { return is_mixed && w.format == PK_Q6_K ? kLonger : 1.0; };
    auto wanted = [&](const Weight &w, double most) { return std::max<int32_t>(1, static_cast<int32_t>(std::ceil(w.n_tiles / std::floor(most / cost(w) + 1e-9)))); };
    double dearest = 0;
    for (int i = 0; i < p->n_w; ++i) dearest = std::max(dearest, cost(p->w[i]));
    // The least that the busiest block may have.
    const double undivided = dearest * ((p->n_tiles + n_blocks - 1) / n_blocks);
    int32_t n[3] = {}, left = -1;
    for (double next = dearest; next <= undivided + 1e-9 && left < 0; next += 0.1) {
        left = n_blocks;
        for (int i = 0; i < p->n_w; ++i) left -= n[i] = wanted(p->w[i], next);
    }
    if (left < 0) return;
    for (; left > 0; --left) {
        int busiest = 0;
        auto load = [&](int i) { return cost(p->w[i]) * p->w[i].n_tiles / n[i]; };
        for (int i = 1; i < p->n_w; ++i)
            if (load(i) > load(busiest)) busiest = i;
        ++n[busiest];
    }
    p->begins[0] = n[0];
    p->begins[1] = p->n_w > 2 ? n[0] + n[1] : n_blocks;
    for (int i = 0; i < p->n_w; ++i) {
        p->w[i].each = p->w[i].n_tiles / n[i];
        p->w[i].more = p->w[i].n_tiles % n[i];
    }
}

// The kernel that has all that the phases take, and the least beside it.
Sort sort_of(const std::vector<Phase> &phases) {
    auto is_lean_for = [&](Sort sort) {
        return std::all_of(phases.begin(), phases.end(), [sort](const Phase &p) {
            if (p.kind == kAttend) return p.attend.head_width == 128 && !p.attend.is_fp8;
            return p.kind != kDelta && (p.kind != kMatmul || std::all_of(p.w, p.w + p.n_w, [sort](const Weight &w) { return takes(sort, w.format); }));
        });
    };
    if (std::any_of(phases.begin(), phases.end(), [](const Phase &p) { return p.kind == kAttend && p.attend.is_half; })) return kHalfPages;
    for (Sort sort : {kNibbles, kBytes, kRowMajor})
        if (is_lean_for(sort)) return sort;
    return kEverything;
}
template <class Call>
auto of_sort(Sort sort, const Call &call) {
    switch (sort) {
        case kHalfPages: return call(std::integral_constant<Sort, kHalfPages>());
        case kNibbles: return call(std::integral_constant<Sort, kNibbles>());
        case kBytes: return call(std::integral_constant<Sort, kBytes>());
        case kRowMajor: return call(std::integral_constant<Sort, kRowMajor>());
        default: return call(std::integral_constant<Sort, kEverything>());
    }
}

// How shared memory is divided. False: something does not fit.
bool share_memory(std::vector<Phase> &phases, int32_t n_blocks, Arguments *a) {
    int32_t slot = 128, x = 0;
    const bool has_nibbles = std::any_of(phases.begin(), phases.end(), [](const Phase &p) {
        return p.kind == kMatmul && std::any_of(p.w, p.w + p.n_w, [](const Weight &w) { return w.format == PK_Q4_K; });
    });
    for (Phase &p : phases) {
        if (p.kind == kAttend) {
            x = std::max(x, attend_bytes(p.attend.head_width));
            slot = std::max(slot, 16 * p.attend.head_width);  // eight positions of K or V
        }
        if (p.kind == kDelta) {
            slot = std::max(slot, kPieceBytes);
            x = std::max(x, kDeltaBytes);
        }
        if (p.kind != kMatmul) continue;
        for (int i = 0; i < p.n_w; ++i) {
            slot = std::max(slot, has_nibbles && p.w[i].format == PK_Q6_K ? kFirstBytes : slot_bytes(p.w[i].format));  // else chunks of Q6_K need no parts
            // Much of what is wanted, little of what is not wanted yet: that would keep blocks that are behind, and packets, waiting.
            a->most_sent = 4;
            a->most_ahead = is_rows(p.w[i].format) || p.w[i].format == PK_Q8_0 ? 1 : 2;
        }
        int32_t longest;
        p.cut = cut_of(p, p.is_paired, n_blocks, &longest);
        const int32_t n_shares = p.n_tiles >> p.is_paired << p.cut;
        p.each = n_shares / n_blocks;
        p.more = n_shares % n_blocks;
        divide(&p, n_blocks);
        x = std::max(x, staged_bytes(p.staging, p.k));
    }
    // What few blocks do is done by those that have a tile less to do behind it.
    for (size_t i = 0; i + 1 < phases.size(); ++i) {
        const int32_t few = phases[i].kind == kDelta ? phases[i].delta.n_v_heads : phases[i].kind == kMatmul && phases[i].each == 0 ? phases[i].more : 0;
        if (few && phases[i + 1].kind == kMatmul) phases[i].shift = phases[i + 1].shift + few;
    }
    a->slot_bytes = slot;
    a->part_bytes = kSumsAt + 4 * kWarps * kWarpSums;
    a->x_bytes = (x + 127) / 128 * 128;
    a->n_slots = 0;
    a->n_slots = std::min<int32_t>(kMaxSlots, (static_cast<int32_t>(kSharedBytes) - layout_of(*a).end) / (kWarps * slot));
    a->most_sent = std::min(a->most_sent, a->n_slots - 1);
    return a->n_slots >= kMinSlots;
}

}  // namespace

int32_t make_plan(const Launch &l, const Records &records, int32_t rows, int32_t min_phases, const Taken &taken, Plan *out) {
    out->rows = rows;
    if (!has_wgmma(l.ctx)) return PK_OK;
    struct Made {
        Run run;
        std::vector<Phase> phases;
        std::vector<int64_t> packets;
        std::vector<CUtensorMap> boxes;
    };
    std::vector<Made> made;
    const int64_t guess = guess_part(records).first;  // from there on it is left out
    auto is_taken = [&](int64_t i) { return std::any_of(taken.begin(), taken.end(), [i](const auto &range) { return range.first <= i && i < range.second; }); };
    for (int64_t i = 0; i < records.n();) {
        Building b = {l.ctx->n_processors, {}, {}, {}, {}};
        int64_t next = i;
        for (; next < records.n() && !is_taken(next) && (next == i || next != guess);) {
            Draft d;
            d.n_records = 1;
            const bool is_idle = next > i && records[next].op == PK_OP_KEEP;  // rows of one token keep nothing
            if (!is_idle && (!read_phase(l, records, next, &d) || !b.add(d))) break;
            next += d.n_records;
        }
        if (static_cast<int32_t>(b.drafts.size()) >= min_phases) {
            Made m;
            m.run.first = i;
            m.run.last = next;
            m.phases = number_phases(b, &m.packets, rows);
            if (share_memory(m.phases, l.ctx->n_processors, &m.run.arguments)) {
                m.run.sort = sort_of(m.phases);
                if (of_sort(m.run.sort, [&](auto sort) { return fits_pairs<sort()>(m.run.arguments, l.ctx->n_processors, stream_of_questions(l.ctx)); })) m.run.arguments.paired = kPairedGroups;
                made.push_back(m);
                i = next;
                continue;
            }
        }
        i = std::max(i + 1, next);
    }
    if (made.empty()) return PK_OK;
    // One piece of memory: epochs, partial sums of attention, buffers of packets, phases. Runs follow each other and share the first three.
    int64_t buffer = 0, n_phases = 0, partial = 0;
    bool has_boxes = false;
    for (const Made &m : made) {
        for (int64_t n : m.packets) buffer = std::max(buffer, (n + 255) / 256 * 256);
        n_phases += static_cast<int64_t>(m.phases.size());
        for (const Phase &p : m.phases) {
            has_boxes |= has_rows(p);
            if (p.kind == kAttend)
                partial = std::max(partial, l.ctx->n_processors * (8 * int64_t{p.attend.head_width} + 16) * 8);
        }
    }
    const int64_t partial_at = 256, ends_at = partial_at + partial, packets_at = ends_at + kBuffers * (l.ctx->n_processors + 1) * int64_t{kEndBytes}, boxes_at = packets_at + kBuffers * buffer;
    const int64_t phases_at = boxes_at + (has_boxes ? 3 * n_phases * static_cast<int64_t>(sizeof(CUtensorMap)) : 0);
    out->n_bytes = phases_at + n_phases * static_cast<int64_t>(sizeof(Phase));
    if (int32_t e = check(cudaMalloc(&out->memory, out->n_bytes), "load")) return e;
    uint8_t *memory = static_cast<uint8_t *>(out->memory);
    if (int32_t e = check(cudaMemsetAsync(memory, 0, phases_at, l.stream), "load")) return e;
    const pk_state &s = *l.state;
    uint8_t *to = memory + phases_at, *boxes_to = memory + boxes_at;
    for (Made &m : made) {
        for (size_t i = 0; i < m.phases.size(); ++i) {
            Phase &p = m.phases[i];
            auto address = [&](int phase) { return reinterpret_cast<uint64_t>(memory + packets_at + phase % kBuffers * buffer); };
            p.shift = p.shift % l.ctx->n_processors;
            if (p.kind != kPublish) p.x.packets += address(p.x.source);
            if (p.add.data) p.add.packets += address(p.add.source);
            p.y.packets = p.y.packets ? address(static_cast<int>(i)) : 0;
            if (p.folded_x) p.folded_x += address(p.x.source);
            if (p.folded_y) p.folded_y += address(static_cast<int>(i));
        }
        Arguments &a = m.run.arguments;
        a.phases = reinterpret_cast<const Phase *>(to);
        if (std::any_of(m.phases.begin(), m.phases.end(), has_rows)) {
            m.boxes.resize(3 * m.phases.size());
            if (int32_t e = make_boxes(l.ctx->driver.encode_tiled, m.phases, &m.boxes)) return e;
            const int64_t n = static_cast<int64_t>(m.boxes.size() * sizeof(CUtensorMap));
            // Behind the memset, which another stream would not wait for.
            if (int32_t e = check(cudaMemcpyAsync(boxes_to, m.boxes.data(), n, cudaMemcpyHostToDevice, l.stream), "load")) return e;
            a.boxes = reinterpret_cast<const CUtensorMap *>(boxes_to);
            boxes_to += n;
        }
        a.n_phases = static_cast<int32_t>(m.phases.size());
        a.info = l.info;
        a.sample_at = reinterpret_cast<const int32_t *>(s.sample_at);
        a.row_slot = reinterpret_cast<const int32_t *>(s.row_slot);
        a.row_position = reinterpret_cast<const int32_t *>(s.row_position);
        a.row_flags = reinterpret_cast<const int32_t *>(s.row_flags);
        a.token_page = reinterpret_cast<const int32_t *>(s.token_page);
        a.page_table = reinterpret_cast<const int32_t *>(s.page_table);
        a.kv = reinterpret_cast<uint8_t *>(s.kv);
        a.recurrent = reinterpret_cast<uint8_t *>(s.recurrent);
        a.recurrent_stride = s.recurrent_stride;
        a.page_stride = s.kv_page_stride;
        a.page_tokens = s.page_tokens;
        a.slot_pages = s.slot_pages;
        a.partial = memory + partial_at;
        a.ends = memory + ends_at;
        a.epochs = reinterpret_cast<uint32_t *>(memory);
        const int64_t bytes = static_cast<int64_t>(m.phases.size() * sizeof(Phase));
        if (int32_t e = check(cudaMemcpyAsync(to, m.phases.data(), bytes, cudaMemcpyHostToDevice, l.stream), "load")) return e;
        to += bytes;
        out->runs.push_back(m.run);
    }
    return check(cudaStreamSynchronize(l.stream), "load");
}

void drop_plan(Plan &plan) {
    if (plan.memory) cudaFree(plan.memory);
    plan = {};
}

const Run *find_run(const std::vector<Plan> &plans, const Launch &l, int64_t i) {
    if (!l.decode_only) return nullptr;
    for (const Plan &plan : plans) {
        if (plan.rows < l.max_tokens || plan.rows < l.max_samples) continue;
        for (const Run &run : plan.runs)
            if (run.first == i) return &run;
        return nullptr;
    }
    return nullptr;
}

int32_t launch_run(const Launch &l, const Run &run) {
    return of_sort(run.sort, [&](auto sort) { return launch_rows<1, sort()>(l, run.arguments, l.ctx->n_processors); });
}

}  // namespace pk::persist
