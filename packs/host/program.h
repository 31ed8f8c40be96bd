// A program as a list of records: reading it, checking it, resolving its symbols. Knows no device.
#pragma once
#include <cstdint>
#include <vector>

#include "../pack.h"

namespace pk {

// Any record: its first two fields, through which the others are reached.
struct Record {
    int32_t op;
    int32_t size;
    template <class Op>
    const Op &as() const {
        return *reinterpret_cast<const Op *>(this);
    }
};

// An owned, aligned copy of the records.
class Records {
   public:
    // Splits n_bytes of records. PK_BAD_ARG: an op is unknown, a size is not the one of its struct, or the bytes end inside a record.
    int32_t read(const void *records, int64_t n_bytes);
    int64_t n() const { return static_cast<int64_t>(starts_.size()); }
    const Record &operator[](int64_t i) const { return *reinterpret_cast<const Record *>(words_.data() + starts_[i]); }

   private:
    std::vector<uint64_t> words_;
    std::vector<int64_t> starts_;
};

const char *op_name(int32_t op);
// JSON list of op names: "prepare", "embed", ...; those above PK_OP_ADD only where has(op) is true.
const char *op_names_json(bool (*has)(int32_t) = nullptr);

// Rows of an operand in a step with n_tokens tokens and n_samples sampled rows.
inline int64_t resolve_rows(int64_t rows, int64_t n_tokens, int64_t n_samples) {
    return rows == PK_ROWS_T ? n_tokens : rows == PK_ROWS_S ? n_samples : rows;
}

// What a pack can do, for the check below.
struct Support {
    const char *pack;
    int32_t activation;               // format of activations: operands of norm, qkv, gate, ...
    bool (*is_weight)(int32_t);       // packed weight formats
    bool (*is_table)(int32_t);        // formats of an unpacked embedding table
    bool (*is_kv)(int32_t);
    bool (*is_copy)(int32_t);         // formats of copy
    int32_t max_head_width;
    bool (*has_op)(int32_t) = nullptr;  // ops above PK_OP_ADD; nullptr: none of them
};

// Checks the state's sizes and every record against it: operands present, shapes fit, formats supported. One sentence with
// the op's index and name, the operand and both numbers. PK_BAD_ARG for a wrong program, PK_UNSUPPORTED for a missing kernel.
int32_t check_state(const pk_state &state);
int32_t check_records(const Records &records, const pk_state &state, const Support &support);

}  // namespace pk
