/* Entry i of an array of 32- or 64-bit integers, or a number that is out of every range where it does not fit an int.
 * */
INLINE int32_t read_int(const int32_t *array, int64_t i, int words) {
    if (words == 1) return array[i];
    int64_t value;
    __builtin_memcpy(&value, array + 2 * i, 8);
    return value == (int32_t)value ? (int32_t)value : INT32_MIN;
}
