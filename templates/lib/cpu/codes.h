/* codes.h: Q and O where they are codes of e4m3, beside convert.h, which knows the wider elements; and the scales for
 * which only kernels with such a Q have fields in their arguments.
 *
 * Where Q is of codes, Q_CODES, and of O, OUTPUT == DTYPE_e4m3, whose elements are floats until it is written. */

#if Q_CODES
typedef uint8_t query_element;
/* Exponent and mantissa of a code lie as a float's do, but for a bias that is less by 120. */
INLINE float of_code(uint8_t code) {
    const float magnitude = (float_bits){.u = (uint32_t)(code & 0x7f) << 20}.f * 0x1p120f;
    const uint32_t bits = (code & 0x7f) == 0x7f ? 0x7fffffff : (float_bits){.f = magnitude}.u;
    return (float_bits){.u = bits | (uint32_t)(code & 0x80) << 24}.f;
}
INLINE void read_query(element *to, const query_element *from, int n) {
    for (int d = 0; d < n; d++) to[d] = narrow(of_code(from[d]));
}
#define Q_SCALE(args, b, head) \
    ((args)->q_scale ? (args)->q_scale[(b) * (args)->q_scale_stride[0] + (head) * (args)->q_scale_stride[1]] : 1)
#else
typedef element query_element;
INLINE void read_query(element *to, const query_element *from, int n) {
    __builtin_memcpy(to, from, sizeof(element) * n);
}
#define Q_SCALE(args, b, head) ((void)(b), (void)(head), 1)
#endif

#if OUTPUT == DTYPE_e4m3
typedef uint8_t output_element;
INLINE void narrow_output(output_element *to, const float *from, int n) {
    for (int d = 0; d < n; d++) to[d] = narrow_8(from[d], 448.0f, 7, 3, 9);
}
INLINE void write_output(output_element *to, const element *from, int n) { narrow_output(to, from, n); }
#define O_SCALE(args) ((args)->o_scale ? *(args)->o_scale : 1)
#else
typedef element output_element;
INLINE void narrow_output(output_element *to, const float *from, int n) { narrow_row(to, from, n); }
INLINE void write_output(output_element *to, const element *from, int n) {
    __builtin_memcpy(to, from, sizeof(element) * n);
}
#define O_SCALE(args) 1
#endif
