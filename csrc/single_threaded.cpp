// Replaces a variable of glibc 2.32 that libstdc++'s reference counts read, so that the library
// loads with glibc 2.28. Zero means "there may be several threads": counts are then always atomic.
extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}
