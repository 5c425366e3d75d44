-- One look at the counters and at the states that hold groups. Returns {counters as name, value, ...}, in flight, ready,
-- leased, trained.
return {
  redis.call('HGETALL', key('counters')),
  redis.call('ZCARD', key('issued')),
  redis.call('ZCARD', key('ready')),
  redis.call('ZCARD', key('leased')),
  redis.call('ZCARD', key('trained')),
}
