-- The learner's weights are a new version. ARGV: version, 1 to ask for its evaluation. Servers know the held-out tasks:
-- evaluate.lua deals them out when one asks for its part.
-- Publishing a version twice changes nothing.
local version = tonumber(ARGV[1])
local last, before = unpack(redis.call('HMGET', key('meta'), 'version', 'evaluated'))
if not last or version > tonumber(last) then
  redis.call('HSET', key('meta'), 'version', version, 'consumed', 0)
end
if ARGV[2] == '1' and (not before or version > tonumber(before)) then
  if before then
    for _, id in ipairs(redis.call('SMEMBERS', key('eval:' .. before .. ':groups'))) do
      redis.call('DEL', key('group:' .. id))
    end
    for _, name in ipairs({'eval_todo:', 'eval_issued:', 'eval_holder:', 'eval_since:', 'eval_handed:',
      'eval_failures:'}) do
      redis.call('DEL', key(name .. before))
    end
    redis.call('DEL', key('eval:' .. before .. ':groups'))
  end
  redis.call('HSET', key('meta'), 'evaluated', version)
end
