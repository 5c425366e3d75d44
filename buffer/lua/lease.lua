-- ready -> leased, all or nothing, oldest tickets first; what is too stale on the way -> expired.
-- ARGV: step, consuming version, count, max_staleness, lease deadline in s. Returns the ids, empty when too few are ready.
-- Asked again for the same step it returns the same lease: the first answer may have been lost.
local lease = key('lease:' .. ARGV[1])
local held = redis.call('ZRANGE', lease, 0, -1)
local intact = #held > 0
for _, id in ipairs(held) do intact = intact and is_held(id, ARGV[1]) end
if intact then return held end
redis.call('DEL', lease)

local wanted = tonumber(ARGV[3])
local oldest_allowed = tonumber(ARGV[2]) - tonumber(ARGV[4])
local fresh, start = {}, 0
while #fresh < wanted do
  local ids = redis.call('ZRANGE', key('ready'), start, start + wanted - 1)
  if #ids == 0 then return {} end
  for _, id in ipairs(ids) do
    if #fresh == wanted then break end
    if tonumber(redis.call('HGET', key('oldest'), id)) < oldest_allowed then
      redis.call('ZREM', key('ready'), id)
      forget(id)
      count('expired', 1)
      count('expired:too_stale', 1)
    else
      fresh[#fresh + 1] = id
      start = start + 1
    end
  end
end
local deadline = now() + tonumber(ARGV[5])
for _, id in ipairs(fresh) do
  redis.call('ZREM', key('ready'), id)
  redis.call('ZADD', key('leased'), deadline, id)
  redis.call('ZADD', lease, id, id)
  redis.call('HSET', key('holder'), id, ARGV[1])
end
return fresh
