// Pages that layers with a window have of their own (pk_op_pool).
#pragma once
#include "../rare.h"
#include "program.h"

namespace pk {

// The program's pool; all 0: it has none.
inline pk_op_pool find_pool(const Records &records) {
    for (int64_t i = 0; i < records.n(); ++i)
        if (records[i].op == PK_OP_POOL && records[i].as<pk_op_pool>().kv) return records[i].as<pk_op_pool>();
    return {};
}

// The state as QKV and ATTENTION see it behind a record with that pool.
inline pk_state with_pool(const pk_state &state, const pk_op_pool &pool) {
    pk_state found = state;
    found.kv = pool.kv;
    found.kv_page_stride = pool.kv_page_stride;
    found.page_table = pool.page_table;
    found.token_page = pool.token_page;
    return found;
}

}  // namespace pk
