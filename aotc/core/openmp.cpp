#include "openmp.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <vector>

namespace aotc {
namespace {

using Parallel = void (*)(void (*)(void*), void*, unsigned threads, unsigned flags);  // GOMP_parallel

struct Team {
  Parallel parallel;
  unsigned threads;
  sem_t made;
};

void* idle(void* given) {
  Team* team = static_cast<Team*>(given);
  team->parallel([](void*) {}, nullptr, team->threads, 0);
  sem_post(&team->made);  // the team is gone after this
  for (;;) pause();       // libgomp keeps the threads of a team for the thread that made it
}

void* wait_for(void* semaphore) {
  while (sem_wait(static_cast<sem_t*>(semaphore))) continue;
  return nullptr;
}

// Whether so many threads can be had, where memory or their number is limited: libgomp ends the process if not.
bool has_room_for(int threads) {
  sem_t end;
  sem_init(&end, 0, 0);
  std::vector<pthread_t> made;
  for (pthread_t thread; static_cast<int>(made.size()) < threads && !pthread_create(&thread, nullptr, wait_for, &end);)
    made.push_back(thread);
  for (size_t index = 0; index < made.size(); index++) sem_post(&end);
  for (pthread_t thread : made) pthread_join(thread, nullptr);
  sem_destroy(&end);
  return static_cast<int>(made.size()) == threads;
}

bool add(Parallel parallel, int threads) {
  Team team{parallel, static_cast<unsigned>(threads), {}};
  sem_init(&team.made, 0, 0);
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for other threads
  pthread_t thread;
  bool made = has_room_for(threads) && !pthread_create(&thread, nullptr, idle, &team);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (made) {
    while (sem_wait(&team.made)) continue;
    pthread_detach(thread);
  }
  sem_destroy(&team.made);
  return made;
}

}  // namespace

int add_idle_teams(int threads) {
  static std::set<void*> seen;  // with the GIL
  int teams = 0;
  for (const char* name : {"libtorch_cpu.so", "libgomp.so.1"}) {  // torch's copy may have a name of its own
    void* library = dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
    void* symbol = library ? dlsym(library, "GOMP_parallel") : nullptr;
    if (library) dlclose(library);
    if (!symbol || !seen.insert(symbol).second) continue;
    Parallel parallel;
    std::memcpy(&parallel, &symbol, sizeof symbol);
    teams += add(parallel, threads);
  }
  return teams;
}

void spin_briefly(int threads) {
  constexpr int MOST_IDLE = 8;
  static std::once_flag once;
  std::call_once(once, [threads] {
    cpu_set_t own;
    int cpus = sched_getaffinity(0, sizeof own, &own) ? 1 : CPU_COUNT(&own), spare = std::max(cpus - threads, 0);
    if (threads == 1 || std::getenv("OMP_WAIT_POLICY") || std::getenv("GOMP_SPINCOUNT") || spare + 2 > MOST_IDLE) return;
    add_idle_teams(spare + 2);
  });
}

}  // namespace aotc
