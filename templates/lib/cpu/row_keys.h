/* row_keys.h: which keys each row of a tile attends to. Both ends only grow with the row, so for a run of rows the keys
 * fall into: outside (no row attends: never read), full (every row attends: no mask code) and mixed. */

typedef struct {
    _Alignas(64) int32_t begin[PANELS * PANEL], end[PANELS * PANEL];
} RowKeys;

/* What softmax.h hands on to `visible`. */
typedef RowKeys ForwardArgs;

/* Lanes of the vector that starts at row `row` of the tile which attend to `key`, as all ones. */
INLINE vi visible(const RowKeys *rows, int64_t row, int64_t key) {
    const vi at = vi_set1((int32_t)key);
    return (at >= *(const vi *)(rows->begin + row)) & (at < *(const vi *)(rows->end + row));
}
