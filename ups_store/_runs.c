/* Runs copied one behind the other into a batch: the only loop of ups_store that isn't Python; see runs.py.

   A loop of memcpy waits for memory at the start of every run, so what comes next is prefetched. A batch that
   is larger than the caches goes past them, which the C library decides by the length of a run instead. */

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define LINE_BYTES 64                      /* of a cache */
#define PAGE_BYTES 4096
#define AHEAD_BYTES 1024                   /* copied while memory answers */
#define PAGES_AHEAD_BYTES (16 << 10)       /* copied while the address of a page is translated */
#define BEGIN_BYTES 512                    /* of the next run; the processor reads on from there by itself */

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

#ifdef __SSE2__

/* From how large a batch on a cache wouldn't hold it until it is used: measured on either make. */
static size_t streamed_bytes(int is_intel)
{
    return (size_t)(is_intel ? 16 : 4) << 20;
}

static inline void put(__m128i *to, __m128i value, const int is_streamed)
{
    if (is_streamed)
        _mm_stream_si128(to, value);
    else
        _mm_storeu_si128(to, value);
}

/* Copies whole lines, each time prefetching the one at `ahead`; returns the number of bytes. Where they are
   streamed, past the caches, `out` begins a line. */
static inline size_t copy_lines(char *out, const char *in, size_t nbytes, const char *ahead, const int is_streamed)
{
    size_t done = 0;
    for (; done + LINE_BYTES <= nbytes; done += LINE_BYTES) {
        const __m128i *from = (const __m128i *)(in + done);
        __m128i *to = (__m128i *)(out + done);
        __builtin_prefetch(ahead + done);
        __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
        __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
        put(to, a, is_streamed);
        put(to + 1, b, is_streamed);
        put(to + 2, c, is_streamed);
        put(to + 3, d, is_streamed);
    }
    return done;
}

/* Copies one piece of a run, prefetching what is as far on at `ahead`. */
static void copy_piece(char *out, const char *in, size_t nbytes, const char *ahead, int is_streamed)
{
    size_t done = 0;
    if (is_streamed) {
        done = (LINE_BYTES - (uintptr_t)out % LINE_BYTES) % LINE_BYTES;
        done = done < nbytes ? done : nbytes;
        memcpy(out, in, done);
        done += copy_lines(out + done, in + done, nbytes - done, ahead + done, 1);
    } else {
        done = copy_lines(out, in, nbytes, ahead, 0);
    }
    memcpy(out + done, in + done, nbytes - done);
}

static void copy_line_by_line(char *out, const char *memory, const int64_t *firsts, size_t num, size_t nbytes,
                              int is_streamed)
{
    size_t runs_ahead = AHEAD_BYTES / nbytes, bytes_ahead = AHEAD_BYTES % nbytes;
    size_t head = nbytes - bytes_ahead; /* what is ahead of it lies in one run, of the rest in the next */
    for (size_t i = 0; i < num; i++, out += nbytes) {
        const char *in = memory + firsts[i], *last = memory + firsts[num - 1];
        const char *near = i + runs_ahead < num ? memory + firsts[i + runs_ahead] : last;
        const char *far = i + runs_ahead + 1 < num ? memory + firsts[i + runs_ahead + 1] : last;
        prefetch_pages(memory, firsts, i, num, nbytes);
        copy_piece(out, in, head, near + bytes_ahead, is_streamed);
        copy_piece(out + head, in + head, bytes_ahead, far, is_streamed);
    }
    if (is_streamed)
        _mm_sfence(); /* before anyone else is told that the batch is there */
}

#endif

static void copy_run_by_run(char *out, const char *memory, const int64_t *firsts, size_t num, size_t nbytes)
{
    size_t begin = nbytes < BEGIN_BYTES ? nbytes : BEGIN_BYTES;
    for (size_t i = 0; i < num; i++, out += nbytes) {
        prefetch_pages(memory, firsts, i, num, nbytes);
        for (size_t done = 0; i + 1 < num && done < begin; done += LINE_BYTES)
            __builtin_prefetch(memory + firsts[i + 1] + done);
        memcpy(out, memory + firsts[i], nbytes);
    }
}

static void copy_all(char *out, const char *memory, const int64_t *firsts, size_t num, size_t nbytes)
{
#ifdef __SSE2__
    int is_intel = __builtin_cpu_is("intel"); /* where memcpy, and what it reads ahead, is faster */
    int is_streamed = num * nbytes >= streamed_bytes(is_intel);
    if (is_streamed || !is_intel) {
        copy_line_by_line(out, memory, firsts, num, nbytes, is_streamed);
        return;
    }
#endif
    copy_run_by_run(out, memory, firsts, num, nbytes);
}

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

/* Where the runs of a batch lie: samples, or windows of them. */
struct batch {
    Py_ssize_t num_samples, sample_nbytes; /* from one sample to the next */
    Py_ssize_t num_starts, step_nbytes;    /* where a window may start, from one time step to the next */
    Py_ssize_t run_nbytes;
    Py_buffer memory, within;              /* `within`: first byte of each run in a sample, int64 */
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
    if (is_right)
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
    if (buffer->ndim == 1 && buffer->itemsize == sizeof(int64_t) && (!strcmp(format, "l") || !strcmp(format, "q")))
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
    "gather(memory, num_samples, sample_nbytes, num_starts, step_nbytes, within, run_nbytes, samples, starts, out)\n"
    "--\n\n"
    "Copy the runs of samples, or of windows that begin at `starts`, one behind the other; lets go of the GIL.\n\n"
    "False, and nothing copied, where the samples or starts aren't int64 of shape (n,) and in their range, or the\n"
    "output isn't contiguous and as long as the runs.");

static PyObject *gather(PyObject *Py_UNUSED(module), PyObject *args)
{
    struct batch b;
    PyObject *samples, *starts, *out;
    if (!PyArg_ParseTuple(args, "y*nnnny*nOOO", &b.memory, &b.num_samples, &b.sample_nbytes, &b.num_starts,
                          &b.step_nbytes, &b.within, &b.run_nbytes, &samples, &starts, &out))
        return NULL;
    int is_right = gather_into(&b, samples, starts, out);
    PyBuffer_Release(&b.memory);
    PyBuffer_Release(&b.within);
    return PyBool_FromLong(is_right);
}

static PyMethodDef methods[] = {
    {"copy", copy, METH_VARARGS, copy_doc},
    {"gather", gather, METH_VARARGS, gather_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_runs", "Runs copied by compiled code.", 0, methods, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__runs(void) { return PyModuleDef_Init(&definition); }
