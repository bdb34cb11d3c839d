// How long the threads of GNU's OpenMP spin before they sleep.
#pragma once

namespace aotc {

// libgomp's threads spin for 300,000 rounds at each barrier (about ten milliseconds) while it manages no more threads than
// it has CPUs, and for 1,000 while it manages more. So a team of `threads` threads is made that sleeps for good, in each
// libgomp of the process that has none yet. How many teams were made: 0 where there is no libgomp, or no thread to be had.
int add_idle_teams(int threads);

// Makes them, once in a process, for a library that uses so many `threads`; not where it uses one, where the environment says
// how long to spin, or where more than eight would have to sleep.
void spin_briefly(int threads);

}  // namespace aotc
