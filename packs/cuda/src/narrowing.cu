// Which records of a program hand rows on narrowed to FP8: what makes them, and the products behind it.
#include <algorithm>

#include "../../host/program.h"
#include "../include/narrow.cuh"

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

}  // namespace

int64_t launch_narrowing(const Records &records, const Launch &l, int64_t i, int64_t end, int32_t *status) {
    const bool is_norm = records[i].op == PK_OP_NORM;
    if (i + 1 >= end || (!is_norm && records[i].op != PK_OP_SIGMOID) || records[i + 1].op != PK_OP_MATMUL) return i;
    const auto &product = records[i + 1].as<pk_op_matmul>();
    const pk_tensor &out = is_norm ? records[i].as<pk_op_norm>().out : records[i].as<pk_op_sigmoid>().out;
    auto reads = [&](int64_t at, const pk_tensor &x) {
        if (at >= end || records[at].op != PK_OP_MATMUL) return false;
        const auto &op = records[at].as<pk_op_matmul>();
        return op.x.data == x.data && op.x.cols == x.cols && op.x.rows == x.rows && op.x.stride == x.stride && op.add.data != x.data && narrows_input(l, op);
    };
    if (!(is_norm ? can_narrow(records[i].as<pk_op_norm>()) : can_narrow(records[i].as<pk_op_sigmoid>())) || !reads(i + 1, out)) return i;
    const int64_t rows = bound(l, out.rows);
    Narrowed x = narrowed_in(l.scratch, rows, out.cols), y;
    if (can_narrow_output(l, product) && reads(i + 2, product.y)) y = narrowed_in(l.scratch + (fp8_scratch(rows, out.cols) + 255) / 256 * 256, rows, product.y.cols);
    // Products of the same rows that follow each other find them where the first one did.
    int64_t next = i + 2;
    while (y.x == nullptr && reads(next, out)) ++next;
    if (y.x != nullptr) next = i + 3;
    x.is_all = !is_read(records, y.x != nullptr ? i + 2 : next, out, rows);
    y.is_all = y.x != nullptr && !is_read(records, next, product.y, rows);
    *status = is_norm ? launch_norm_narrowing(l, records[i].as<pk_op_norm>(), x) : launch_sigmoid_narrowing(l, records[i].as<pk_op_sigmoid>(), x);
    if (!*status) *status = launch_matmul_narrowed(l, product, x, y);
    for (int64_t at = i + 2; at < next && !*status; ++at) *status = launch_matmul_narrowed(l, records[at].as<pk_op_matmul>(), y.x != nullptr ? y : x, {});
    return next;
}

}  // namespace pk
