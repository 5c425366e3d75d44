-- A learner (re)starts from a checkpoint: leased -> ready, and what was trained after that step -> ready.
-- ARGV: steps done in the checkpoint, so those from there on are undone. Returns how many groups came back.
local ids = redis.call('ZRANGE', key('leased'), 0, -1)
for _, id in ipairs(redis.call('ZRANGEBYSCORE', key('trained'), ARGV[1], '+inf')) do ids[#ids + 1] = id end
for _, id in ipairs(ids) do
  redis.call('ZREM', key('leased'), id)
  redis.call('ZREM', key('trained'), id)
  redis.call('ZADD', key('ready'), id, id)
end
redis.call('HDEL', key('meta'), 'finished')
return #ids
