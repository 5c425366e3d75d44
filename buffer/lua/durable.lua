-- trained -> durable: a checkpoint on disk contains these groups' steps. ARGV: steps done, so those below. Returns how many.
local ids = redis.call('ZRANGEBYSCORE', key('trained'), '-inf', '(' .. ARGV[1])
for _, id in ipairs(ids) do
  redis.call('HSET', key('about:' .. id), 'durable_at', string.format('%.6f', now()))
  enter(id, 'durable', redis.call('ZSCORE', key('trained'), id), 'in the checkpoint of ' .. ARGV[1] .. ' steps')
end
count('durable', #ids)
return #ids
