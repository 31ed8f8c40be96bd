// Which records of a program are made together: norms and heads by the products beside them, and rows that are handed on narrowed to FP8.
#include <algorithm>

#include "../../host/program.h"
#include "../include/attention_narrowing.h"
#include "../include/even_plan.h"
#include "../include/gemm.cuh"
#include "../include/narrow.cuh"
#include "../include/skinny.cuh"

namespace pk {
namespace {

// Whether a record from `first` on reads what lies at t before one writes all of it anew. What is left at the end, anybody may read.
bool is_read(const Records &records, int64_t first, const pk_tensor &t, int64_t n_rows) {
    const uint64_t end = t.data + n_rows * t.stride;
    for (int64_t i = first; i < records.n(); ++i) {
        const Record &r = records[i];
        const uint64_t *words = reinterpret_cast<const uint64_t *>(&r);
        const auto n_named = std::count_if(words, words + r.size / 8, [&](uint64_t word) { return word >= t.data && word < end; });
        if (n_named == 0) continue;
        const pk_tensor *out = nullptr;
        switch (r.op) {
            case PK_OP_NORM: out = &r.as<pk_op_norm>().out; break;
            case PK_OP_MATMUL: out = &r.as<pk_op_matmul>().y; break;
            case PK_OP_ATTENTION: out = &r.as<pk_op_attention>().out; break;
            case PK_OP_DELTA: out = &r.as<pk_op_delta>().out; break;
        }
        return n_named > 1 || out == nullptr || out->data != t.data || out->rows != t.rows || out->cols != t.cols || out->stride != t.stride;
    }
    return true;
}

// Whether a record from `first` on reads the rows at t before a norm or a product writes them anew; once the program is done nobody does.
bool is_read_again(const Records &records, int64_t first, const pk_tensor &t) {
    for (int64_t i = first; i < records.n(); ++i) {
        const Record &r = records[i];
        const uint64_t *words = reinterpret_cast<const uint64_t *>(&r);
        const auto n = std::count_if(words, words + r.size / 8, [&](uint64_t word) { return word >= t.data && word < t.data + t.stride; });
        if (n == 1 && (r.op == PK_OP_NORM ? r.as<pk_op_norm>().out.data : r.op == PK_OP_MATMUL ? r.as<pk_op_matmul>().y.data : 0) == t.data) return false;
        if (n > 0) return true;
    }
    return false;
}

// The norm behind product `at` of which that and the next product can each make a half; null: none.
const pk_op_norm *norm_behind(const Records &records, const Launch &l, int64_t at, int64_t end) {
    if (at + 2 >= end || records[at + 1].op != PK_OP_NORM || records[at + 2].op != PK_OP_MATMUL) return nullptr;
    const auto &norm = records[at + 1].as<pk_op_norm>();
    return halves_norm(l, records[at].as<pk_op_matmul>(), norm, records[at + 2].as<pk_op_matmul>()) && !is_read_again(records, at + 3, norm.out) ? &norm : nullptr;
}

// The heads behind product `at` that it can do what is done with; null: none.
const pk_op_qkv *heads_behind(const Records &records, const Launch &l, int64_t at, int64_t end) {
    if (at + 2 >= end || records[at + 1].op != PK_OP_QKV || records[at + 2].op != PK_OP_ATTENTION) return nullptr;
    const auto &heads = records[at + 1].as<pk_op_qkv>();
    pk_tensor rest = heads.qkv;  // keys and values in the product's own rows, and queries that go elsewhere
    if (heads.q.data == rest.data) {
        rest.data += heads.n_heads * heads.head_width * 2;
        rest.stride -= heads.n_heads * heads.head_width * 2;
    }
    return ends_heads(l, records[at].as<pk_op_matmul>(), heads) && !is_read_again(records, at + 2, rest) ? &heads : nullptr;
}

// Whether record `at` is a product of x that takes it narrowed.
bool reads_narrowed(const Records &records, const Launch &l, int64_t at, int64_t end, const pk_tensor &x) {
    if (at >= end || records[at].op != PK_OP_MATMUL) return false;
    const auto &op = records[at].as<pk_op_matmul>();
    return op.x.data == x.data && op.x.cols == x.cols && op.x.rows == x.rows && op.x.stride == x.stride && op.add.data != x.data && narrows_input(l, op);
}

// A run of products from `at` on, of x as it is handed. Of FP8 weights the scratch has sums of squares, what norms of `width` columns leave, and what other products read, in this
// order. The record behind it.
int64_t launch_run(const Records &records, const Launch &l, int64_t at, int64_t end, Handed handed, int64_t width, int32_t *status) {
    const int64_t rows = bound(l, PK_ROWS_T);
    Beside beside;
    for (;;) {
        const auto &product = records[at].as<pk_op_matmul>();
        const bool is_narrow = narrows_input(l, product);
        const pk_op_norm *norm = beside.before ? nullptr : norm_behind(records, l, at, end);  // one norm's squares at a time
        if (norm && width && norm->x.cols != width) norm = nullptr;
        beside.after = norm;
        beside.heads = norm ? nullptr : heads_behind(records, l, at, end);
        handed.left = {};
        if (is_narrow && norm) {
            width = norm->x.cols;
            handed.squares = reinterpret_cast<float *>(l.scratch);
            handed.scratch = l.scratch + half_scratch(rows, width);
            handed.left = narrowed_in(l.scratch + squares_bytes(rows, width), rows, width);
        } else if (is_narrow && width && can_narrow_output(l, product) && reads_narrowed(records, l, at + 1, end, product.y)) {
            handed.left = narrowed_in(l.scratch + half_scratch(rows, width), rows, product.y.cols);
            handed.left.is_all = !is_read(records, at + 2, product.y, rows);
        }
        *status = launch_matmul_beside(l, product, beside, handed, next_product(records, at, end));
        if (*status || (!norm && !handed.left.x)) return at + (beside.heads ? 2 : 1);
        beside.before = norm;
        handed.x = handed.left;
        at += norm ? 2 : 1;
    }
}

// What record r leaves, if it can do so narrowed; null: it cannot.
const pk_tensor *what_narrows(const Record &r, const Launch &l) {
    switch (r.op) {
        case PK_OP_NORM: return can_narrow(r.as<pk_op_norm>()) ? &r.as<pk_op_norm>().out : nullptr;
        case PK_OP_SIGMOID: return can_narrow(r.as<pk_op_sigmoid>()) ? &r.as<pk_op_sigmoid>().out : nullptr;
        case PK_OP_ATTENTION: {
            const auto &op = r.as<pk_op_attention>();
            return bound(l, op.out.rows) <= kEvenRows && can_narrow(l, op) ? &op.out : nullptr;
        }
        default: return nullptr;
    }
}
int32_t launch_narrowed(const Record &r, const Launch &l, const Narrowed &to) {
    switch (r.op) {
        case PK_OP_NORM: return launch_norm_narrowing(l, r.as<pk_op_norm>(), to);
        case PK_OP_SIGMOID: return launch_sigmoid_narrowing(l, r.as<pk_op_sigmoid>(), to);
        default: return launch_attention_narrowing(l, r.as<pk_op_attention>(), to);
    }
}

}  // namespace

const pk_op_matmul *next_product(const Records &records, int64_t at, int64_t end) {
    int64_t i = at + 1;
    while (i < end && (records[i].op == PK_OP_NORM || records[i].op == PK_OP_QKV || records[i].op == PK_OP_ATTENTION)) ++i;
    return i < end && records[i].op == PK_OP_MATMUL ? &records[i].as<pk_op_matmul>() : nullptr;
}

int64_t squares_bytes(int64_t max_rows, int64_t cols) { return (cols + 63) / 64 * ((std::min(max_rows, kFp8ClusterRows) + 63) / 64 * 64) * 4; }
int64_t half_scratch(int64_t max_rows, int64_t cols) { return squares_bytes(max_rows, cols) + (fp8_scratch(max_rows, cols) + 255) / 256 * 256; }

int64_t launch_beside(const Records &records, const Launch &l, int64_t i, int64_t end, int32_t *status) {
    if (records[i].op != PK_OP_MATMUL || (!norm_behind(records, l, i, end) && !heads_behind(records, l, i, end))) return i;
    return launch_run(records, l, i, end, {}, 0, status);
}

int64_t launch_narrowing(const Records &records, const Launch &l, int64_t i, int64_t end, int32_t *status) {
    if (i + 1 >= end || records[i + 1].op != PK_OP_MATMUL) return i;
    const pk_tensor *narrowed = what_narrows(records[i], l);
    if (narrowed == nullptr || !reads_narrowed(records, l, i + 1, end, *narrowed)) return i;
    const pk_tensor &out = *narrowed;
    // Products of the same rows that follow each other find them where the first one did.
    int64_t next = i + 2;
    while (reads_narrowed(records, l, next, end, out)) ++next;
    const int64_t rows = bound(l, out.rows);
    const pk_op_norm *norm = next == i + 2 ? norm_behind(records, l, i + 1, end) : nullptr;  // which leaves its rows where a norm's lie
    const int64_t width = norm ? norm->x.cols : out.cols;
    // Behind what that norm leaves, which is written while others still read these rows, and attention's behind its partial sums: few where it has few multiprocessors. Even products
    // want no more of the scratch.
    const bool is_attention = records[i].op == PK_OP_ATTENTION;
    const int64_t behind = norm ? half_scratch(rows, width) : squares_bytes(rows, width), place = is_attention ? std::max(attention_parts_bytes(l.ctx), behind) : behind;
    if (is_attention && l.scratch_bytes < place + fp8_scratch(kEvenRows, out.cols)) return i;
    Handed handed;
    handed.x = narrowed_in(l.scratch + place, rows, out.cols);
    handed.x.is_all = !is_read(records, next, out, rows);
    *status = launch_narrowed(records[i], l, handed.x);
    if (*status || next == i + 2) return *status ? next : launch_run(records, l, i + 1, end, handed, width, status);
    for (int64_t at = i + 1; at < next && !*status; ++at) *status = launch_matmul_beside(l, records[at].as<pk_op_matmul>(), {}, handed);
    return next;
}

}  // namespace pk
