// Which records are the end of a last layer, and their likes for sampled rows.
#include "last_rows.h"

#include "../../rare.h"

#include <algorithm>
#include <vector>

namespace pk {
namespace {

bool is_same(const pk_tensor &a, const pk_tensor &b) { return a.data == b.data && a.rows == b.rows && a.cols == b.cols && a.stride == b.stride && a.format == b.format; }

int64_t row_bytes(const pk_tensor &t) { return t.cols * (t.format == PK_F32 ? 4 : 2); }

// So many rows of t from `data` on, side by side.
pk_tensor rows_at(pk_tensor t, uint64_t data, int64_t rows) {
    t.data = data;
    t.rows = rows;
    t.stride = row_bytes(t);
    return t;
}

template <class Op>
void add(std::vector<uint64_t> *words, const Op &op) {
    const auto *from = reinterpret_cast<const uint64_t *>(&op);
    words->insert(words->end(), from, from + sizeof(Op) / 8);
}

int32_t read(const std::vector<uint64_t> &words, Records *to) { return to->read(words.data(), static_cast<int64_t>(words.size() * 8)); }

// Whether a record from `first` on names what lies in t.
bool is_named(const Records &records, int64_t first, const pk_tensor &t, int64_t rows) {
    const uint64_t end = t.data + rows * row_bytes(t);
    for (int64_t i = first; i < records.n(); ++i) {
        const auto *words = reinterpret_cast<const uint64_t *>(&records[i]);
        if (std::any_of(words, words + records[i].size / 8, [&](uint64_t word) { return word >= t.data && word < end; })) return true;
    }
    return false;
}

}  // namespace

int32_t find_last_rows(const Records &records, const pk_state &state, LastRows *found) {
    int64_t at = -1;
    bool is_step = false;
    for (int64_t i = 0; i < records.n(); ++i) {
        const int32_t op = records[i].op;
        if (op == PK_OP_GUESS || (op == PK_OP_GATHER && at >= 0)) return PK_OK;
        if (op == PK_OP_GATHER) at = i;
        is_step |= op == PK_OP_PREPARE;
    }
    if (!is_step || at < 5 || at + 1 >= records.n() || records[at + 1].op != PK_OP_NORM || records[at - 5].op != PK_OP_ATTENTION) return PK_OK;
    if (records[at - 4].op != PK_OP_MATMUL || records[at - 3].op != PK_OP_NORM || records[at - 2].op != PK_OP_MATMUL || records[at - 1].op != PK_OP_MATMUL) return PK_OK;
    pk_op_gather gather = records[at].as<pk_op_gather>();
    pk_op_matmul o = records[at - 4].as<pk_op_matmul>(), first = records[at - 2].as<pk_op_matmul>(), down = records[at - 1].as<pk_op_matmul>();
    pk_op_norm norm = records[at - 3].as<pk_op_norm>(), last = records[at + 1].as<pk_op_norm>();
    const pk_tensor residual = gather.x, normed = norm.out, hidden = first.y;
    const bool is_chain = gather.pool == PK_POOL_LAST && residual.rows == PK_ROWS_T && residual.format == PK_F32 && is_same(o.y, residual) && is_same(o.add, residual) && is_same(norm.x, residual) && norm.residual.data == 0 &&
                          is_same(first.x, normed) && first.add.data == 0 && is_same(down.x, hidden) && is_same(down.y, residual) && is_same(down.add, residual) && is_same(last.x, gather.out) && last.residual.data == 0;
    if (!is_chain || o.x.rows != PK_ROWS_T || o.x.format != PK_BF16 || normed.format != PK_BF16 || (normed.stride && normed.stride != row_bytes(normed)) || o.x.data == normed.data) return PK_OK;
    // They lie in the norm's rows, which nobody needs between the layer's first product and this norm: what it leaves, then the residual, then attention's rows.
    const int64_t n = state.max_step_rows, m = normed.cols, room = state.max_step_tokens * m * 2, behind = (n * m * 2 + 255) / 256 * 256;
    if (behind + n * m * 4 + n * o.x.cols * 2 > room || m % 128) return PK_OK;
    if (is_named(records, at + 2, residual, state.max_step_tokens) || is_named(records, at + 2, gather.out, n)) return PK_OK;
    const pk_tensor attended = rows_at(o.x, normed.data + behind + n * m * 4, PK_ROWS_S), kept = rows_at(residual, normed.data + behind, PK_ROWS_S);
    std::vector<uint64_t> gathers, products, end;
    gather.x = o.x;
    gather.out = attended;
    add(&gathers, gather);
    gather.x = residual;
    gather.out = kept;
    add(&gathers, gather);
    o.x = rows_at(attended, attended.data, PK_ROWS_T);
    o.y = o.add = norm.x = down.y = down.add = rows_at(kept, kept.data, PK_ROWS_T);
    add(&products, o);
    add(&products, norm);
    add(&products, first);
    add(&products, down);
    last.x = kept;
    add(&end, last);
    if (int32_t e = read(gathers, &found->gathers)) return e;
    if (int32_t e = read(products, &found->products)) return e;
    if (int32_t e = read(end, &found->norm)) return e;
    found->first = at - 4;
    found->end = at + 2;
    return PK_OK;
}

}  // namespace pk
