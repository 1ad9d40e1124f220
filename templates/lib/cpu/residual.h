/* residual.h: what O loses when it is rounded to 16 bits, in bf16 whatever the elements are. */

static uint16_t narrow_lost(float x) {
    uint32_t u = (float_bits){.f = x}.u;
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

/* Of a row that was rounded; zero beside an infinity or NaN, which lose nothing that could be added. */
static void store_lost(uint16_t *to, const element *rounded, const float *row, int n) {
    for (int d = 0; d < n; d++) {
        const int finite = !is_special(rounded + d);
        to[d] = narrow_lost(finite ? row[d] - widen(rounded[d]) : 0);
    }
}

/* The sum of a row's products with one of dO, whose elements lie `pitch` apart. */
static float lost_product(const uint16_t *lost, const float *dout, int pitch, int n) {
    float sum = 0;
    for (int d = 0; d < n; d++) sum += (float_bits){.u = (uint32_t)lost[d] << 16}.f * dout[d * pitch];
    return sum;
}
