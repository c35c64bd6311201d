/* Runs copied one behind the other into a batch, and their CRC-32C: all of ups_store that isn't Python; see runs.py.

   One run after the other waits for memory at the start of every run. So several are copied in lockstep, a line of
   each in turn: the processor follows as many streams at a time, and their waits overlap. Long runs are left to
   memcpy, whose instructions fit the processor. A batch that is larger than the caches goes past them, which the
   C library decides by the length of a run instead. */

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define LINE_BYTES 64                 /* of a cache */
#define PAGE_BYTES 4096
#define CRC_BYTES 4                   /* of a CRC-32C, behind what it is of */
#define WIDTH 8                       /* runs in lockstep: more than the ways of a first-level cache evict each other */
#define STREAMED_WIDTH 4              /* of those past the caches: lines wait in few buffers until they are whole */
#define PAGES_AHEAD_BYTES (16 << 10)  /* copied while the address of a page is translated */
#define BEGIN_BYTES 128               /* of the next runs; the processor reads on from there by itself */
#define LONG_BYTES (32 << 10)         /* runs whose beginnings take little of their time: memcpy, one by one */

static size_t streamed_bytes = 16 << 20; /* from how large a batch on a cache wouldn't hold it until it is used */

/* Prefetches a line of every page, up to 16, of a run that is copied later than run `i`, for the TLB. */
static void prefetch_pages(const char *memory, const int64_t *firsts, size_t i, size_t num, size_t nbytes)
{
    size_t later = i + PAGES_AHEAD_BYTES / nbytes + 1;
    if (later >= num)
        return;
    const char *run = memory + firsts[later];
    size_t asked = nbytes < 16 * PAGE_BYTES ? nbytes : 16 * PAGE_BYTES;
    for (size_t done = 0; done < asked; done += PAGE_BYTES)
        __builtin_prefetch(run + done);
    __builtin_prefetch(run + asked - 1);
}

/* Prefetches what the next runs in lockstep need first. */
static inline void prefetch_next(const char *memory, const int64_t *firsts, size_t i, size_t num, size_t width,
                                 size_t nbytes)
{
    size_t begin = nbytes < BEGIN_BYTES ? nbytes : BEGIN_BYTES;
    for (size_t run = i; run < i + width; run++) {
        prefetch_pages(memory, firsts, run, num, nbytes);
        for (size_t done = 0; run + width < num && done < begin; done += LINE_BYTES)
            __builtin_prefetch(memory + firsts[run + width] + done);
    }
}

/* Copies a line; where it is streamed, past the caches, `out` begins one. */
static inline void copy_line(char *out, const char *in, const int is_streamed)
{
#ifdef __SSE2__
    if (is_streamed) {
        __m128i line[4];
        memcpy(line, in, LINE_BYTES);
        for (int part = 0; part < 4; part++)
            _mm_stream_si128((__m128i *)out + part, line[part]);
        return;
    }
#endif
    memcpy(out, in, LINE_BYTES);
}

/* Copies `width` runs of at least a line in lockstep. */
static inline __attribute__((always_inline)) void copy_together(
    char *out, const char *memory, const int64_t *firsts, const size_t width, size_t nbytes, const int is_streamed)
{
    const char *from[WIDTH];
    char *to[WIDTH];
    for (size_t run = 0; run < width; run++) {
        from[run] = memory + firsts[run];
        to[run] = out + run * nbytes;
        if (is_streamed) { /* from where a line of the output begins */
            size_t skipped = -(uintptr_t)to[run] % LINE_BYTES;
            memcpy(to[run], from[run], LINE_BYTES);
            from[run] += skipped;
            to[run] += skipped;
        }
    }
    size_t whole = nbytes / LINE_BYTES * LINE_BYTES - (is_streamed ? LINE_BYTES : 0);
    for (size_t done = 0; done < whole; done += LINE_BYTES) {
#pragma GCC unroll 8
        for (size_t run = 0; run < width; run++)
            copy_line(to[run] + done, from[run] + done, is_streamed);
    }
    for (size_t run = 0; run < width; run++) {
        size_t left = out + (run + 1) * nbytes - (to[run] + whole);
        memcpy(to[run] + whole, from[run] + whole, left);
    }
}

static inline __attribute__((always_inline)) void copy_lockstep(
    char *out, const char *memory, const int64_t *firsts, size_t num, const size_t width, size_t nbytes,
    const int is_streamed)
{
    size_t i = 0;
    for (; i + width <= num; i += width) {
        prefetch_next(memory, firsts, i, num, width, nbytes);
        copy_together(out + i * nbytes, memory, firsts + i, width, nbytes, is_streamed);
    }
    copy_together(out + i * nbytes, memory, firsts + i, num - i, nbytes, is_streamed);
}

/* Copies long runs one by one, the beginning of the next one prefetched: the C library knows its processor. */
static void copy_long(char *out, const char *memory, const int64_t *firsts, size_t num, size_t nbytes)
{
    for (size_t i = 0; i < num; i++) {
        prefetch_next(memory, firsts, i, num, 1, nbytes);
        memcpy(out + i * nbytes, memory + firsts[i], nbytes);
    }
}

static void copy_all(char *out, const char *memory, const int64_t *firsts, size_t num, size_t nbytes)
{
    int is_streamed = 0;
#ifdef __SSE2__
    is_streamed = num * nbytes >= streamed_bytes && nbytes >= 2 * LINE_BYTES;
#endif
    if (nbytes < LINE_BYTES) {
        for (size_t i = 0; i < num; i++)
            memcpy(out + i * nbytes, memory + firsts[i], nbytes);
    } else if (!is_streamed && nbytes >= LONG_BYTES) {
        copy_long(out, memory, firsts, num, nbytes);
    } else if (!is_streamed) {
        copy_lockstep(out, memory, firsts, num, WIDTH, nbytes, 0);
    } else {
        copy_lockstep(out, memory, firsts, num, STREAMED_WIDTH, nbytes, 1);
#ifdef __SSE2__
        _mm_sfence(); /* before anyone else is told that the batch is there */
#endif
    }
}

/* Where runs go: one every `stride` bytes; nowhere if `begin` is NULL. */
struct out {
    char *begin;
    size_t stride;
};

/* CRC-32C (Castagnoli) by the processor's instruction, 8 bytes at a time. */
#if defined(__x86_64__)
#define HAS_INSTRUCTION __builtin_cpu_supports("sse4.2")
#define WITH_INSTRUCTION __attribute__((target("sse4.2")))
#define CRC_OF_WORD(crc, word) __builtin_ia32_crc32di(crc, word)
#define CRC_OF_BYTE(crc, byte) __builtin_ia32_crc32qi((uint32_t)(crc), byte)
#elif defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#define HAS_INSTRUCTION 1
#define WITH_INSTRUCTION
#define CRC_OF_WORD(crc, word) __crc32cd((uint32_t)(crc), word)
#define CRC_OF_BYTE(crc, byte) __crc32cb((uint32_t)(crc), byte)
#endif

#ifdef HAS_INSTRUCTION

#define POLYNOMIAL 0x82F63B78u /* reflected, RFC 3720 appendix B.4 */
#define LONG_RUN_BYTES 4096    /* cut in pieces where it is alone, as each step of a checksum waits for the one before */

static int has_instruction(void) { return HAS_INSTRUCTION; }

/* CRC-32C of `width` runs in lockstep, which are copied to `out`. */
WITH_INSTRUCTION static inline __attribute__((always_inline)) void check_together(
    const struct out out, const char *memory, const int64_t *firsts, const size_t width, size_t nbytes,
    uint32_t *crcs)
{
    uint64_t states[WIDTH];
    for (size_t run = 0; run < width; run++)
        states[run] = 0xFFFFFFFFu;
    size_t whole = nbytes / LINE_BYTES * LINE_BYTES;
    for (size_t done = 0; done < whole; done += LINE_BYTES) {
#pragma GCC unroll 8
        for (size_t run = 0; run < width; run++) {
            const char *in = memory + firsts[run] + done;
            uint64_t word, state = states[run];
#pragma GCC unroll 8
            for (int byte = 0; byte < LINE_BYTES; byte += 8) {
                memcpy(&word, in + byte, sizeof word);
                state = CRC_OF_WORD(state, word);
            }
            states[run] = state;
            if (out.begin)
                memcpy(out.begin + run * out.stride + done, in, LINE_BYTES);
        }
    }
    for (size_t run = 0; run < width; run++) {
        const char *in = memory + firsts[run];
        for (size_t done = whole; done < nbytes; done++)
            states[run] = CRC_OF_BYTE(states[run], (uint8_t)in[done]);
        if (out.begin)
            memcpy(out.begin + run * out.stride + whole, in + whole, nbytes - whole);
        crcs[run] = ~(uint32_t)states[run];
    }
}

WITH_INSTRUCTION static void check_width(struct out out, const char *memory, const int64_t *firsts, size_t nbytes,
                                         uint32_t *crcs)
{
    check_together(out, memory, firsts, WIDTH, nbytes, crcs);
}

WITH_INSTRUCTION static void check_few(struct out out, const char *memory, const int64_t *firsts, size_t width,
                                       size_t nbytes, uint32_t *crcs)
{
    check_together(out, memory, firsts, width, nbytes, crcs);
}

/* Product of two polynomials, modulo that of CRC-32C. */
static uint32_t multiply(uint32_t a, uint32_t b)
{
    uint32_t product = 0;
    for (uint32_t bit = 1u << 31; bit; bit >>= 1) {
        product ^= a & bit ? b : 0;
        b = b & 1 ? b >> 1 ^ POLYNOMIAL : b >> 1;
    }
    return product;
}

/* By what to multiply a checksum for `nbytes` zeros behind it. */
static uint32_t zeros(size_t nbytes)
{
    uint32_t product = 1u << 31, power = 1u << 23; /* x^0, x^8 */
    for (; nbytes; nbytes >>= 1, power = multiply(power, power))
        product = nbytes & 1 ? multiply(product, power) : product;
    return product;
}

/* CRC-32C of one run, in pieces in lockstep, which are copied to `out` one behind the other unless that is NULL. */
static uint32_t check_long(char *out, const char *memory, int64_t first, size_t nbytes)
{
    size_t piece = nbytes / WIDTH / LINE_BYTES * LINE_BYTES, left = nbytes - WIDTH * piece;
    int64_t firsts[WIDTH], last = first + (int64_t)(WIDTH * piece);
    uint32_t crcs[WIDTH], crc, factor = zeros(piece);
    for (size_t i = 0; i < WIDTH; i++)
        firsts[i] = first + (int64_t)(i * piece);
    check_width((struct out){out, piece}, memory, firsts, piece, crcs);
    crc = crcs[0];
    for (size_t i = 1; i < WIDTH; i++)
        crc = multiply(factor, crc) ^ crcs[i];
    check_few((struct out){out ? out + WIDTH * piece : NULL, left}, memory, &last, 1, left, crcs);
    return multiply(zeros(left), crc) ^ crcs[0];
}

/* CRC-32C of up to WIDTH runs, which are copied to `out`. */
static void check_group(struct out out, const char *memory, const int64_t *firsts, size_t num, size_t nbytes,
                        uint32_t *crcs)
{
    if (num == WIDTH)
        check_width(out, memory, firsts, nbytes, crcs);
    else if (num > 2 || nbytes < LONG_RUN_BYTES)
        check_few(out, memory, firsts, num, nbytes, crcs);
    else
        for (size_t i = 0; i < num; i++)
            crcs[i] = check_long(out.begin ? out.begin + i * out.stride : NULL, memory, firsts[i], nbytes);
}

#else

static int has_instruction(void) { return 0; }

static void check_group(struct out out, const char *memory, const int64_t *firsts, size_t num, size_t nbytes,
                        uint32_t *crcs)
{
    (void)out, (void)memory, (void)firsts, (void)num, (void)nbytes, (void)crcs;
}

#endif

/* Whether all values are in 0 .. end - 1. */
static int are_below(const int64_t *values, Py_ssize_t num, int64_t end)
{
    uint64_t largest = 0; /* a negative one is larger than all others */
    for (Py_ssize_t i = 0; i < num; i++)
        largest = (uint64_t)values[i] > largest ? (uint64_t)values[i] : largest;
    return num == 0 || (end > 0 && largest < (uint64_t)end);
}

PyDoc_STRVAR(copy_doc, "copy(memory, firsts, nbytes, out)\n--\n\n"
    "Copy runs of `nbytes` bytes that begin at `firsts` (int64) one behind the other; lets go of the GIL.");

static PyObject *copy(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer memory, firsts, out;
    Py_ssize_t nbytes;
    if (!PyArg_ParseTuple(args, "y*y*nw*", &memory, &firsts, &nbytes, &out))
        return NULL;
    Py_ssize_t num = firsts.len / (Py_ssize_t)sizeof(int64_t);
    int is_right = nbytes > 0 && out.len % nbytes == 0 && out.len / nbytes == num
        && firsts.len % (Py_ssize_t)sizeof(int64_t) == 0;
    Py_BEGIN_ALLOW_THREADS
    is_right = is_right && are_below(firsts.buf, num, memory.len - nbytes + 1);
    if (is_right)
        copy_all(out.buf, memory.buf, firsts.buf, (size_t)num, (size_t)nbytes);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&memory);
    PyBuffer_Release(&firsts);
    PyBuffer_Release(&out);
    if (is_right)
        Py_RETURN_NONE;
    PyErr_SetString(PyExc_ValueError, "runs reach outside the memory, or don't fill the output");
    return NULL;
}

static uint32_t stored_crc(const char *memory, size_t offset)
{
    const uint8_t *bytes = (const uint8_t *)memory + offset;
    return bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 | (uint32_t)bytes[3] << 24;
}

/* Marks the slots whose payload has another CRC-32C than the one behind it, or that don't end in zeros. */
static void mark_damaged(const char *slots, size_t num, size_t stride, size_t nbytes, uint8_t *marks)
{
    for (size_t i = 0; i < num; i += WIDTH) {
        size_t some = num - i < WIDTH ? num - i : WIDTH;
        int64_t firsts[WIDTH];
        uint32_t crcs[WIDTH];
        for (size_t j = 0; j < some; j++)
            firsts[j] = (int64_t)((i + j) * stride);
        check_group((struct out){NULL, 0}, slots, firsts, some, nbytes, crcs);
        for (size_t j = 0; j < some; j++) {
            const char *slot = slots + firsts[j];
            uint8_t rest = 0;
            for (size_t byte = nbytes + CRC_BYTES; byte < stride; byte++)
                rest |= (uint8_t)slot[byte];
            marks[i + j] = stored_crc(slot, nbytes) != crcs[j] || rest;
        }
    }
}

PyDoc_STRVAR(damaged_doc, "damaged(slots, stride, nbytes, marks)\n--\n\n"
    "Mark (uint8) the slots, `stride` bytes each, whose payload of `nbytes` has another CRC-32C than the one behind\n"
    "it, or that don't end in zeros; lets go of the GIL.\n\n"
    "False, and nothing marked, where the processor has no instruction for it.");

static PyObject *damaged(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer slots, marks;
    Py_ssize_t stride, nbytes;
    if (!PyArg_ParseTuple(args, "y*nnw*", &slots, &stride, &nbytes, &marks))
        return NULL;
    int is_right = nbytes >= 0 && stride >= CRC_BYTES && nbytes <= stride - CRC_BYTES && slots.len % stride == 0
        && slots.len / stride == marks.len;
    Py_BEGIN_ALLOW_THREADS
    if (is_right && has_instruction())
        mark_damaged(slots.buf, (size_t)marks.len, (size_t)stride, (size_t)nbytes, marks.buf);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&slots);
    PyBuffer_Release(&marks);
    if (is_right)
        return PyBool_FromLong(has_instruction());
    PyErr_SetString(PyExc_ValueError, "not so many slots of this size");
    return NULL;
}

/* Copies runs to the beginnings of slots, and puts the CRC-32C of each behind it. */
static void seal_all(char *slots, size_t stride, const char *memory, const int64_t *firsts, size_t num, size_t nbytes)
{
    for (size_t i = 0; i < num; i += WIDTH) {
        size_t some = num - i < WIDTH ? num - i : WIDTH;
        uint32_t crcs[WIDTH];
        struct out out = {slots + i * stride, stride};
        prefetch_next(memory, firsts, i, num, some, nbytes);
        check_group(out, memory, firsts + i, some, nbytes, crcs);
        for (size_t j = 0; j < some; j++)
            for (size_t byte = 0; byte < CRC_BYTES; byte++)
                out.begin[j * stride + nbytes + byte] = (char)(crcs[j] >> 8 * byte);
    }
}

PyDoc_STRVAR(seal_doc, "seal(memory, firsts, nbytes, slots, stride)\n--\n\n"
    "Copy runs of `nbytes` bytes that begin at `firsts` (int64) to the beginnings of slots, `stride` bytes each, and\n"
    "put the CRC-32C of each behind it; lets go of the GIL.\n\n"
    "False, and nothing copied, where the processor has no instruction for it.");

static PyObject *seal(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer memory, firsts, slots;
    Py_ssize_t nbytes, stride;
    if (!PyArg_ParseTuple(args, "y*y*nw*n", &memory, &firsts, &nbytes, &slots, &stride))
        return NULL;
    Py_ssize_t num = firsts.len / (Py_ssize_t)sizeof(int64_t);
    int is_right = nbytes > 0 && stride >= CRC_BYTES && nbytes <= stride - CRC_BYTES && slots.len % stride == 0
        && slots.len / stride == num && firsts.len % (Py_ssize_t)sizeof(int64_t) == 0;
    Py_BEGIN_ALLOW_THREADS
    is_right = is_right && are_below(firsts.buf, num, memory.len - nbytes + 1);
    if (is_right && has_instruction())
        seal_all(slots.buf, (size_t)stride, memory.buf, firsts.buf, (size_t)num, (size_t)nbytes);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&memory);
    PyBuffer_Release(&firsts);
    PyBuffer_Release(&slots);
    if (is_right)
        return PyBool_FromLong(has_instruction());
    PyErr_SetString(PyExc_ValueError, "runs reach outside the memory, or don't fit into so many slots");
    return NULL;
}

PyDoc_STRVAR(stream_from_doc, "stream_from(nbytes)\n--\n\n"
    "Have batches from this size on written past the caches.");

static PyObject *stream_from(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_ssize_t nbytes;
    if (!PyArg_ParseTuple(args, "n", &nbytes))
        return NULL;
    streamed_bytes = (size_t)nbytes;
    Py_RETURN_NONE;
}

/* Where the runs of a batch lie: samples, or windows of them. */
struct batch {
    Py_ssize_t num_samples, sample_nbytes; /* from one sample to the next */
    Py_ssize_t num_starts, step_nbytes;    /* where a window may start, from one time step to the next */
    Py_ssize_t run_nbytes;
    Py_ssize_t payload_nbytes;             /* of a sample; its CRC-32C lies behind it */
    Py_buffer memory, within;              /* `within`: first byte of each run in a sample, int64 */
    Py_buffer checked;                     /* whether each sample was, a byte each; empty where none is to be */
};

/* First bytes of the runs of each sample; returns 0 where a sample or a start isn't there. */
static int fill_firsts(const struct batch *b, const int64_t *samples, Py_ssize_t num, const int64_t *starts,
                       int64_t *firsts)
{
    const int64_t *within = b->within.buf;
    Py_ssize_t per_sample = b->within.len / (Py_ssize_t)sizeof(int64_t);
    if (!are_below(samples, num, b->num_samples) || (starts && !are_below(starts, num, b->num_starts)))
        return 0;
    for (Py_ssize_t i = 0; i < num; i++) {
        /* Another thread may have written to them since: whatever comes of that is checked by the caller. */
        uint64_t first = (uint64_t)samples[i] * (uint64_t)b->sample_nbytes;
        if (starts)
            first += (uint64_t)starts[i] * (uint64_t)b->step_nbytes;
        for (Py_ssize_t j = 0; j < per_sample; j++)
            *firsts++ = (int64_t)(first + (uint64_t)within[j]);
    }
    return 1;
}

/* Whether a sample's checksum is the one that is stored; it counts as checked from then on. */
static int is_sound(const struct batch *b, int64_t first, uint32_t crc)
{
    int is_equal = stored_crc(b->memory.buf, (size_t)(first + b->payload_nbytes)) == crc;
    if (is_equal)
        ((uint8_t *)b->checked.buf)[first / b->sample_nbytes] = 1;
    return is_equal;
}

/* Checks samples that begin at `firsts`, and copies them to `out` unless that is NULL; returns 0 for damage. */
static int check_samples(const struct batch *b, char *out, const int64_t *firsts, size_t num)
{
    uint32_t crcs[WIDTH];
    for (size_t i = 0; i < num; i += WIDTH) {
        size_t some = num - i < WIDTH ? num - i : WIDTH, nbytes = (size_t)b->payload_nbytes;
        struct out to = {out ? out + i * nbytes : NULL, nbytes};
        check_group(to, b->memory.buf, firsts + i, some, nbytes, crcs);
        for (size_t j = 0; j < some; j++)
            if (!is_sound(b, firsts[i + j], crcs[j]))
                return 0;
    }
    return 1;
}

/* Copies, and checks the samples of the runs before, or meanwhile; returns 0 for damage, or a run behind them all. */
static int copy_checked(const struct batch *b, char *out, const int64_t *firsts, size_t num_runs, size_t per_sample)
{
    const uint8_t *checked = b->checked.buf;
    size_t num = 0, num_samples = num_runs / per_sample;
    int64_t *unchecked = malloc(num_samples * sizeof(int64_t) + 1);
    if (!unchecked)
        return 0;
    for (size_t i = 0; i < num_samples; i++) {
        int64_t sample = firsts[i * per_sample] / b->sample_nbytes;
        if (sample >= b->num_samples) {
            free(unchecked);
            return 0;
        }
        unchecked[num] = sample * b->sample_nbytes;
        num += !checked[sample];
    }
    int is_whole = num == num_runs && b->run_nbytes == b->payload_nbytes; /* one run each, and none was checked */
    int is_right = check_samples(b, is_whole ? out : NULL, unchecked, num);
    if (is_right && !is_whole)
        copy_all(out, b->memory.buf, firsts, num_runs, (size_t)b->run_nbytes);
    free(unchecked);
    return is_right;
}

/* Whether the samples of a batch can be checked here. */
static int is_checkable(const struct batch *b)
{
    return has_instruction() && b->checked.len == b->num_samples && b->payload_nbytes > 0
        && b->payload_nbytes <= b->sample_nbytes - CRC_BYTES && b->memory.len / b->sample_nbytes >= b->num_samples;
}

/* Checks and copies without the GIL; returns 0 where the arguments aren't as they should be. */
static int gather_all(const struct batch *b, const Py_buffer *samples, const Py_buffer *starts, Py_buffer *out)
{
    Py_ssize_t num = samples->shape[0], per_sample = b->within.len / (Py_ssize_t)sizeof(int64_t);
    Py_ssize_t num_runs = num * per_sample;
    if (b->run_nbytes <= 0 || out->len / b->run_nbytes != num_runs || out->len % b->run_nbytes)
        return 0;
    int64_t *firsts = malloc((size_t)num_runs * sizeof(int64_t) + 1); /* of none it might be NULL */
    int is_right = firsts && fill_firsts(b, samples->buf, num, starts->buf, firsts)
        && are_below(firsts, num_runs, b->memory.len - b->run_nbytes + 1);
    if (is_right && b->checked.buf)
        is_right = num_runs == 0
            || (is_checkable(b) && copy_checked(b, out->buf, firsts, (size_t)num_runs, (size_t)per_sample));
    else if (is_right)
        copy_all(out->buf, b->memory.buf, firsts, (size_t)num_runs, (size_t)b->run_nbytes);
    free(firsts);
    return is_right;
}

/* A buffer of int64, shape (n,), where `object` has one; else returns 0 and leaves no error. */
static int get_int64(PyObject *object, Py_buffer *buffer)
{
    if (PyObject_GetBuffer(object, buffer, PyBUF_ND | PyBUF_FORMAT) < 0) {
        PyErr_Clear();
        return 0;
    }
    const char *format = buffer->format;
    int is_aligned = (uintptr_t)buffer->buf % sizeof(int64_t) == 0;
    if (is_aligned && buffer->ndim == 1 && buffer->itemsize == sizeof(int64_t)
        && (!strcmp(format, "l") || !strcmp(format, "q")))
        return 1;
    PyBuffer_Release(buffer);
    return 0;
}

static int gather_into(const struct batch *b, PyObject *samples, PyObject *starts, PyObject *out)
{
    Py_buffer of_samples, of_starts = {0}, of_out;
    int is_right = 0;
    if (!get_int64(samples, &of_samples))
        return 0;
    if (starts == Py_None || get_int64(starts, &of_starts)) {
        is_right = starts == Py_None || of_starts.shape[0] == of_samples.shape[0];
        if (is_right && PyObject_GetBuffer(out, &of_out, PyBUF_WRITABLE) == 0) {
            Py_BEGIN_ALLOW_THREADS
            is_right = gather_all(b, &of_samples, &of_starts, &of_out);
            Py_END_ALLOW_THREADS
            PyBuffer_Release(&of_out);
        } else {
            PyErr_Clear();
            is_right = 0;
        }
        PyBuffer_Release(&of_starts);
    }
    PyBuffer_Release(&of_samples);
    return is_right;
}

PyDoc_STRVAR(gather_doc,
    "gather(memory, num_samples, sample_nbytes, num_starts, step_nbytes, within, run_nbytes, samples, starts, out,\n"
    "       checked, payload_nbytes)\n"
    "--\n\n"
    "Copy the runs of samples, or of windows that begin at `starts`, one behind the other; lets go of the GIL.\n"
    "Samples that aren't `checked` yet are, by the CRC-32C behind their payload.\n\n"
    "False, and nothing of use copied, where the samples or starts aren't aligned int64 of shape (n,) in their range,\n"
    "the output isn't contiguous and as long as the runs, or a sample is damaged.");

static PyObject *gather(PyObject *Py_UNUSED(module), PyObject *args)
{
    struct batch b = {0};
    PyObject *samples, *starts, *out, *checked;
    if (!PyArg_ParseTuple(args, "y*nnnny*nOOOOn", &b.memory, &b.num_samples, &b.sample_nbytes, &b.num_starts,
                          &b.step_nbytes, &b.within, &b.run_nbytes, &samples, &starts, &out, &checked,
                          &b.payload_nbytes))
        return NULL;
    int is_right = checked == Py_None || PyObject_GetBuffer(checked, &b.checked, PyBUF_WRITABLE) == 0;
    is_right = is_right && gather_into(&b, samples, starts, out);
    PyErr_Clear();
    PyBuffer_Release(&b.checked);
    PyBuffer_Release(&b.memory);
    PyBuffer_Release(&b.within);
    return PyBool_FromLong(is_right);
}

static PyMethodDef methods[] = {
    {"copy", copy, METH_VARARGS, copy_doc},
    {"damaged", damaged, METH_VARARGS, damaged_doc},
    {"gather", gather, METH_VARARGS, gather_doc},
    {"seal", seal, METH_VARARGS, seal_doc},
    {"stream_from", stream_from, METH_VARARGS, stream_from_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_runs", "Runs copied by compiled code.", 0, methods, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__runs(void) { return PyModuleDef_Init(&definition); }
